{{- define "pagewire.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Labels that select a part's pods: (list . "engine") */ -}}
{{- define "pagewire.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "pagewire.labels" -}}
{{- $root := index . 0 -}}
{{ include "pagewire.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: pagewire
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- /* (list . repository) */ -}}
{{- define "pagewire.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- if $image.registry -}}{{ trimSuffix "/" $image.registry }}/{{- end -}}
{{ index . 1 }}:{{ default (index . 0).Chart.AppVersion $image.tag }}
{{- end -}}

{{- define "pagewire.serviceAccount" -}}
{{- default (ternary (include "pagewire.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "pagewire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "pagewire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* What pods of every part begin with: (list . part-values "component") */ -}}
{{- define "pagewire.podHead" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
serviceAccountName: {{ include "pagewire.serviceAccount" $root }}
# No part of pagewire talks to Kubernetes.
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "pagewire.podSecurity" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* Secret with the file of API keys; empty: none are asked for. */ -}}
{{- define "pagewire.apiKeySecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.keys -}}
{{- include "pagewire.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "pagewire.adapterClaim" -}}
{{- default (printf "%s-adapters" (include "pagewire.fullname" .)) .Values.adapters.existingClaim -}}
{{- end -}}
