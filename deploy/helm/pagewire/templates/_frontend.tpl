{{- define "pagewire.frontendSettings" -}}
{{- $decided := dict "engine" (printf "%s-engine:50061" (include "pagewire.fullname" .)) "host" "*" "http-port" 8000 "grpc-port" 50051 "grace-period-s" .Values.frontend.gracePeriodSeconds -}}
{{- if include "pagewire.apiKeySecret" . -}}
{{- $_ := set $decided "api-key-file" "/keys/keys" -}}
{{- end -}}
{{- if .Values.metrics.open -}}
{{- $_ := set $decided "open-metrics" true -}}
{{- end -}}
{{- if and .Values.adapters.enabled .Values.adapters.runtimeUpdating -}}
{{- $_ := set $decided "allow-runtime-lora-updating" true -}}
{{- end -}}
{{- if .Values.tls.frontend.secret -}}
{{- $_ := set $decided "tls-cert" "/tls/tls.crt" -}}
{{- $_ := set $decided "tls-key" "/tls/tls.key" -}}
{{- if .Values.tls.frontend.clientCertificates -}}
{{- $_ := set $decided "tls-client-ca" "/tls/ca.crt" -}}
{{- $_ := set $decided "local-socket" "/run/pagewire/grpc.sock" -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.engine.secret -}}
{{- $_ := set $decided "engine-ca" "/engine-tls/ca.crt" -}}
{{- $_ := set $decided "engine-cert" "/engine-tls/tls.crt" -}}
{{- $_ := set $decided "engine-key" "/engine-tls/tls.key" -}}
{{- end -}}
{{- range $key, $_ := $decided -}}
{{- if hasKey $.Values.frontend.settings $key -}}
{{- fail (printf "frontend.settings: %s is decided by the chart; see its values" $key) -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge $decided .Values.frontend.settings) -}}
{{- end -}}

{{- /* (list . path service): over HTTP, which Kubernetes asks without checking certificates; where clients must
show one, by the local socket. */ -}}
{{- define "pagewire.frontendProbe" -}}
{{- $tls := (index . 0).Values.tls.frontend -}}
{{- if and $tls.secret $tls.clientCertificates -}}
exec:
  command:
    - python
    - -m
    - pagewire_frontend.health_check
    - unix:/run/pagewire/grpc.sock
    {{- with index . 2 }}
    - {{ . }}
    {{- end }}
timeoutSeconds: 10
{{- else -}}
httpGet:
  path: {{ index . 1 }}
  port: http
  scheme: {{ ternary "HTTPS" "HTTP" (ne $tls.secret "") }}
timeoutSeconds: 5
{{- end -}}
{{- end -}}
