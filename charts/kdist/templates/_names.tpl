{{/* Names and labels. Selectors contain only name and instance, because they are immutable. */}}
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

{{- define "kdist.ownLabels" -}}
app.kubernetes.io/name: {{ include "kdist.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: platform
app.kubernetes.io/part-of: kdist
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The labels of an object, each key once. Precedence: the chart's own (its policies select by them), the object's, commonLabels. */}}
{{- define "kdist.labels" -}}
{{- include "kdist.labelsWith" (dict "root" . "more" (dict)) }}
{{- end }}

{{- define "kdist.labelsWith" -}}
{{- $own := include "kdist.ownLabels" .root | fromYaml }}
{{- with .component }}{{ $_ := set $own "app.kubernetes.io/component" . }}{{ end }}
{{- toYaml (mergeOverwrite (dict) .root.Values.commonLabels .more $own) }}
{{- end }}

{{/* The labels that kdist sets on the pods of every training. */}}
{{- define "kdist.trainings" -}}
app.kubernetes.io/name: kdist
app.kubernetes.io/component: training
{{- end }}

{{/* The name of the controller's objects, and the labels of its pods. */}}
{{- define "kdist.controller" -}}
{{- printf "%s-controller" (include "kdist.fullname" .) }}
{{- end }}

{{- define "kdist.controllerSelector" -}}
app.kubernetes.io/name: {{ include "kdist.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: controller
{{- end }}

{{- define "kdist.serviceAccount" -}}
{{- default (ternary (printf "%s-training" (include "kdist.fullname" .)) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "kdist.image" -}}
{{- include "kdist.imageOf" (dict "root" . "image" .Values.image) }}
{{- end }}

{{- define "kdist.imageOf" -}}
{{- $global := .root.Values.global.imageRegistry }}
{{- $registry := ternary (printf "%s/" (trimSuffix "/" $global)) "" (ne $global "") }}
{{- $version := ternary (printf "@%s" .image.digest) (printf ":%s" (default .root.Chart.AppVersion .image.tag)) (ne .image.digest "") }}
{{- printf "%s%s%s" $registry .image.repository $version }}
{{- end }}

{{/* Image pull secrets: the parent chart's, then the chart's own, without duplicates. */}}
{{- define "kdist.imagePullSecrets" -}}
{{- $names := list }}
{{- range concat .Values.global.imagePullSecrets .Values.imagePullSecrets }}
{{- $names = append $names (dict "name" (ternary . (get (ternary dict . (kindIs "string" .)) "name") (kindIs "string" .))) }}
{{- end }}
{{- with uniq $names }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* "true" if a resource is enabled: always, or with `auto` if the cluster has its API. */}}
{{- define "kdist.wanted" -}}
{{- if or (eq .enabled "always") (and (eq .enabled "auto") (.root.Capabilities.APIVersions.Has .api)) }}true{{ end }}
{{- end }}
