{{/*
Everything that waits for a start is computed here, from startup.budgetSeconds; what contradicts it
fails the render. A probe that gave up earlier would kill a pod in the middle of its load.
*/}}

{{/*
Probes until the budget is used up, and a minute more: the launcher gives up first, because it says why.
*/}}
{{- define "assay.startupFailures" -}}
{{- div (add .Values.startup.budgetSeconds 60 .Values.startup.periodSeconds -1) .Values.startup.periodSeconds -}}
{{- end }}

{{/* Before a container can start: weights that are still being fetched hold the pod in its init container. */}}
{{- define "assay.weightsSeconds" -}}
{{- if eq .Values.weights.source "download" }}{{ .Values.weights.download.budgetSeconds }}{{ else }}0{{ end -}}
{{- end }}

{{/* Pull of the image (tens of GB) and scheduling. */}}
{{- define "assay.pullSeconds" -}}900{{- end }}

{{- define "assay.leastProgressSeconds" -}}
{{- add (include "assay.weightsSeconds" . | int) .Values.startup.budgetSeconds (include "assay.pullSeconds" . | int) -}}
{{- end }}

{{- define "assay.progressDeadline" -}}
{{- $least := include "assay.leastProgressSeconds" . | int -}}
{{- $given := .Values.startup.progressDeadlineSeconds -}}
{{- if kindIs "invalid" $given -}}
{{- $least -}}
{{- else if lt (int $given) $least -}}
{{- fail (printf "startup.progressDeadlineSeconds: %d is less than %d, what weights (%s s), image (%s s) and startup.budgetSeconds (%d s) may take: the Deployment would be called failed while it loads" (int $given) $least (include "assay.weightsSeconds" .) (include "assay.pullSeconds" .) (int .Values.startup.budgetSeconds)) -}}
{{- else -}}
{{- int $given -}}
{{- end -}}
{{- end }}

{{/* The gate's Job waits for the door, then judges. */}}
{{- define "assay.gateDeadline" -}}
{{- add (include "assay.progressDeadline" . | int) .Values.gate.timeoutSeconds -}}
{{- end }}

{{/* Advice for helm --timeout, in whole minutes: the start and, by a hook, the gate. */}}
{{- define "assay.helmTimeoutMinutes" -}}
{{- $seconds := include "assay.progressDeadline" . | int -}}
{{- if and .Values.gate.enabled .Values.gate.afterUpgrade }}{{ $seconds = include "assay.gateDeadline" . | int }}{{ end -}}
{{- div (add $seconds 119) 60 -}}
{{- end }}
