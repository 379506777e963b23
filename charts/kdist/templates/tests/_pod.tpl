{{/* What both test pods share: as restricted as trainings are. */}}
{{- define "kdist.testPod" -}}
restartPolicy: Never
serviceAccountName: {{ include "kdist.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
activeDeadlineSeconds: 600
{{- /* As the pods of trainings have it, so that what judges these (Pod Security, OpenShift's SCCs) judges those the same. */}}
securityContext:
  runAsNonRoot: true
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- include "kdist.imagePullSecrets" . }}
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
  privileged: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- end }}
