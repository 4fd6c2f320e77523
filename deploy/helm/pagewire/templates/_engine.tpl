{{- /* engine-service's settings file: what values say, and over it what the chart decides. */ -}}
{{- define "pagewire.engineSettings" -}}
{{- $decided := dict "model" (required "set model.name: a hub name, or a path below /models" .Values.model.name) "device" .Values.engine.device "host" "0.0.0.0" "port" 50061 "stream-endpoint" "tcp://0.0.0.0:50062" "drain-timeout-s" .Values.engine.drainSeconds -}}
{{- if .Values.adapters.enabled -}}
{{- $_ := set $decided "enable-lora" true -}}
{{- if .Values.adapters.runtimeUpdating -}}
{{- $_ := set $decided "lora-dir" "/adapters" -}}
{{- end -}}
{{- $modules := list -}}
{{- range $name, $folder := .Values.adapters.modules -}}
{{- $modules = append $modules (printf "%s=/adapters/%s" $name $folder) -}}
{{- end -}}
{{- with $modules -}}
{{- $_ := set $decided "lora-modules" . -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.engine.secret -}}
{{- $_ := set $decided "tls-cert" "/tls/tls.crt" -}}
{{- $_ := set $decided "tls-key" "/tls/tls.key" -}}
{{- $_ := set $decided "tls-client-ca" "/tls/ca.crt" -}}
{{- end -}}
{{- range $key, $_ := $decided -}}
{{- if hasKey $.Values.engine.settings $key -}}
{{- fail (printf "engine.settings: %s is decided by the chart; see its values" $key) -}}
{{- end -}}
{{- end -}}
{{- toYaml (merge $decided .Values.engine.settings) -}}
{{- end -}}

{{- /* How a probe asks the engine: Kubernetes' own knows no TLS. */ -}}
{{- define "pagewire.engineProbe" -}}
{{- if .Values.tls.engine.secret -}}
exec:
  command:
    - python
    - -m
    - pagewire_frontend.health_check
    - 127.0.0.1:50061
    - pagewire.v1.Engine
    - --ca=/tls/ca.crt
    - --cert=/tls/tls.crt
    - --key=/tls/tls.key
    - --server-name={{ include "pagewire.fullname" . }}-engine
timeoutSeconds: 10
{{- else -}}
grpc:
  port: 50061
  service: pagewire.v1.Engine
timeoutSeconds: 5
{{- end -}}
{{- end -}}
