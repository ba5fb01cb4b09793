{{/*
Base of every name: the release, or release-assay. At most 40 characters, so that the longest suffix
here, a pod's own and a LeaderWorkerSet's stay under 63. A name that is cut ends in a hash: two long
releases that begin alike must not meet.
*/}}
{{- define "assay.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "assay" $name) }}{{ $name = printf "%s-assay" $name }}{{ end -}}
{{- if gt (len $name) 40 -}}
{{- printf "%s-%s" ($name | trunc 31 | trimSuffix "-") (.Release.Name | sha256sum | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end }}

{{/* Labels of an object. Takes (dict "root" $ "component" "server" "colour" ""). */}}
{{- define "assay.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: assay
{{ include "assay.selector" . }}
{{- end }}

{{/* What selects: never changes over upgrades, and differs between two releases in one namespace. */}}
{{- define "assay.selector" -}}
app.kubernetes.io/name: assay
app.kubernetes.io/instance: {{ .root.Release.Name | trunc 63 | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .colour }}
assay/colour: {{ . }}
{{- end }}
{{- end }}

{{/* Whatever belongs to the release. */}}
{{- define "assay.release" -}}
app.kubernetes.io/name: assay
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | quote }}
{{- end }}

{{/* Name of a colour's object: base-server, base-server-blue. */}}
{{- define "assay.named" -}}
{{- $name := printf "%s-%s" (include "assay.name" .root) .component -}}
{{- with .colour }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
{{- $name -}}
{{- end }}

{{/* Value of the label assay_release: one release in one namespace, whatever Prometheus sees beside it. */}}
{{- define "assay.scope" -}}
{{- printf "%s/%s" .Release.Namespace (include "assay.name" .) -}}
{{- end }}
