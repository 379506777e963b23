{{/* Names and labels. Selectors take name and instance only, for they cannot change later. */}}
{{- define "kdist.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kdist.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- $name := include "kdist.name" . }}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kdist.labels" -}}
app.kubernetes.io/name: {{ include "kdist.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: platform
app.kubernetes.io/part-of: kdist
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What the pods of every training carry; kdist itself gives them these labels. */}}
{{- define "kdist.trainings" -}}
app.kubernetes.io/name: kdist
app.kubernetes.io/component: training
{{- end }}

{{- define "kdist.serviceAccount" -}}
{{- default (ternary (printf "%s-training" (include "kdist.fullname" .)) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "kdist.image" -}}
{{- $registry := ternary (printf "%s/" .Values.global.imageRegistry) "" (ne .Values.global.imageRegistry "") }}
{{- $version := ternary (printf "@%s" .Values.image.digest) (printf ":%s" (default .Chart.AppVersion .Values.image.tag)) (ne .Values.image.digest "") }}
{{- printf "%s%s%s" $registry .Values.image.repository $version }}
{{- end }}

{{/* "true" where a thing is wanted: always, or with `auto` where the cluster knows its API. */}}
{{- define "kdist.wanted" -}}
{{- if or (eq .enabled "always") (and (eq .enabled "auto") (.root.Capabilities.APIVersions.Has .api)) }}true{{ end }}
{{- end }}
