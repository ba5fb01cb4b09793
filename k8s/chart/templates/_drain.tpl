{{/*
preStop, --shutdown-timeout and the grace period come from here and nowhere else. kubelet counts the
preStop hook in the grace period; the launcher asks vLLM to stop, gives it drain.seconds and 20 seconds
more, then ends what is left. A shorter grace would cut streams by SIGKILL.
*/}}
{{- define "assay.launcherMargin" -}}20{{- end }}

{{- define "assay.grace" -}}
{{- $least := add .Values.drain.preStopSeconds .Values.drain.seconds (include "assay.launcherMargin" . | int) -}}
{{- $given := .Values.drain.graceSeconds -}}
{{- if kindIs "invalid" $given -}}
{{- add $least 10 -}}
{{- else if lt (int $given) (int $least) -}}
{{- fail (printf "drain.graceSeconds: %d is less than %d, the sum of drain.preStopSeconds (%d), drain.seconds (%d) and the launcher's margin (%s): streams would be cut" (int $given) (int $least) (int .Values.drain.preStopSeconds) (int .Values.drain.seconds) (include "assay.launcherMargin" .)) -}}
{{- else -}}
{{- int $given -}}
{{- end -}}
{{- end }}
