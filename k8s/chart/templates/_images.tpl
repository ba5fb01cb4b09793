{{/* A reference by digest or tag. Takes (dict "root" $ "image" dict "what" "images.server"). */}}
{{- define "assay.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{- if and (not .image.digest) (eq $tag "latest") -}}
{{- fail (printf "%s.tag: `latest` names another image tomorrow, so no rollback could go back to it; give a version or a digest" .what) -}}
{{- end -}}
{{- $repository := .image.repository -}}
{{- $first := splitList "/" $repository | first -}}
{{- $named := and (contains "/" $repository) (or (contains "." $first) (contains ":" $first) (eq $first "localhost")) -}}
{{- if and .root.Values.imageRegistry (not $named) }}{{ $repository = printf "%s/%s" (trimSuffix "/" .root.Values.imageRegistry) $repository }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository $tag -}}
{{- end -}}
{{- end }}

{{- define "assay.serverImage" -}}
{{- $image := .root.Values.images.server -}}
{{- if .server.digest -}}
{{- $image = merge (dict "digest" .server.digest) $image -}}
{{- else if .server.tag -}}
{{- $image = merge (dict "tag" .server.tag "digest" "") (omit $image "digest") -}}
{{- end -}}
{{- include "assay.image" (dict "root" .root "image" $image "what" "images.server") -}}
{{- end }}

{{- define "assay.gateImage" -}}
{{- include "assay.image" (dict "root" . "image" .Values.images.gate "what" "images.gate") -}}
{{- end }}
