{{/* Pod Security "restricted", for every pod of the chart. */}}
{{- define "assay.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.podSecurity.runAsUser }}
runAsUser: {{ . }}
{{- end }}
{{- with .Values.podSecurity.fsGroup }}
fsGroup: {{ . }}
# A recursive chown of a terabyte would use up the start-up budget.
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "assay.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* What every pod says alike. */}}
{{- define "assay.podBasics" -}}
# Kubernetes would set VARIABLES for every Service of the namespace; one called vllm gives VLLM_PORT=tcp://...
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "assay.podSecurity" . | nindent 2 }}
{{- end }}

{{/* GPUs join the limits and the requests of the server's container. */}}
{{- define "assay.serverResources" -}}
{{- $resources := deepCopy .Values.server.resources -}}
{{- $extra := dict -}}
{{- if and (gt (int .Values.gpu.count) 0) (not .Values.gpu.dra.enabled) -}}
{{- $_ := set $extra .Values.gpu.resourceName (int .Values.gpu.count) -}}
{{- end -}}
{{- if and (gt (int .Values.parallelism.nodes) 1) .Values.parallelism.rdma.resourceName -}}
{{- $_ := set $extra .Values.parallelism.rdma.resourceName (int .Values.parallelism.rdma.count) -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (dict) $extra (get $resources $kind | default dict)) -}}
{{- end -}}
{{- if .Values.gpu.dra.enabled -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
