{{/*
The servers of a release as JSON: one without a colour, or one for each enabled colour with what it
overrides. Each has {colour, tag, digest, revision}.
*/}}
{{- define "assay.variants" -}}
{{- $list := list -}}
{{- if .Values.blueGreen.enabled -}}
{{- range $colour := list "blue" "green" -}}
{{- $own := get $.Values.blueGreen $colour -}}
{{- if $own.enabled -}}
{{- $list = append $list (dict "colour" $colour "tag" $own.tag "digest" $own.digest "revision" ($own.revision | default $.Values.model.revision)) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $list = list (dict "colour" "" "tag" "" "digest" "" "revision" .Values.model.revision) -}}
{{- end -}}
{{- dict "variants" $list | toJson -}}
{{- end }}

{{/* The server that the gate judges, as JSON: the idle colour if there is one, for it is the new one. */}}
{{- define "assay.judged" -}}
{{- $variants := (include "assay.variants" . | fromJson).variants -}}
{{- $judged := first $variants -}}
{{- range $variants }}{{ if and $.Values.blueGreen.enabled (ne .colour $.Values.blueGreen.active) }}{{ $judged = . }}{{ end }}{{ end -}}
{{- $judged | toJson -}}
{{- end }}

{{/*
What a verdict is about: change any of it, and it says nothing any more. Not the colour: what was judged
as the only server is the same as blue. Takes (dict "root" $ "server"
variant).
*/}}
{{- define "assay.identity" -}}
{{- $v := .root.Values -}}
{{- $parts := list (include "assay.serverImage" .) $v.model.repository .server.revision $v.weights.source $v.weights.subPath $v.profile.name $v.profile.inline $v.profile.inlineEnv ($v.server.extraArgs | toJson) ($v.server.extraEnv | toJson) ($v.parallelism | toJson) ($v.gpu | toJson) $v.gate.policy $v.gate.inlinePolicy $v.gate.hardware -}}
{{- $parts | toJson | sha256sum | trunc 12 }}
{{- end }}

{{/* Folder of the checkpoint in a pod; empty: the image knows. */}}
{{- define "assay.modelFolder" -}}
{{- if ne .root.Values.weights.source "image" -}}
{{- $sub := .root.Values.weights.subPath -}}
{{- if and (not $sub) (eq .root.Values.weights.source "download") }}{{ $sub = .server.revision }}{{ end -}}
/models{{ with $sub }}/{{ . }}{{ end }}
{{- end -}}
{{- end }}

{{- define "assay.weightsClaim" -}}
{{- if eq .root.Values.weights.source "claim" -}}
{{- .root.Values.weights.claim.name -}}
{{- else -}}
{{- include "assay.named" (dict "root" .root "component" "weights" "colour" .server.colour) -}}
{{- end -}}
{{- end }}

{{- define "assay.cacheClaim" -}}
{{- .root.Values.cache.existingClaim | default (include "assay.named" (dict "root" .root "component" "cache" "colour" .server.colour)) -}}
{{- end }}
