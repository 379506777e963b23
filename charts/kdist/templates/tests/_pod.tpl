{{/* The common part of the test pods: as restricted as the pods of trainings. */}}
{{- define "kdist.testPod" -}}
restartPolicy: Never
serviceAccountName: {{ include "kdist.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
activeDeadlineSeconds: 600
{{- /* The same as for the pods of trainings, so that Pod Security and OpenShift's SCCs treat them the same. */}}
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
