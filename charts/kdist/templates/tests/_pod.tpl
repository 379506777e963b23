{{/* What both test pods share: as restricted as trainings are. */}}
{{- define "kdist.testPod" -}}
restartPolicy: Never
serviceAccountName: {{ include "kdist.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
activeDeadlineSeconds: 600
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kdist.testContainer" -}}
image: {{ include "kdist.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources:
  requests: {{ toJson .Values.tests.resources }}
  limits: {{ toJson .Values.tests.resources }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}
