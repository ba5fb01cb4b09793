{{/* Arguments and variables of the server's container; the image's entrypoint is the launcher. */}}

{{- define "assay.serverCommand" -}}
{{- $v := .root.Values -}}
{{- $local := int $v.gpu.count -}}
{{- $group := list
  (printf "--data-parallel-size=%d" (mul $local (int $v.parallelism.nodes)))
  (printf "--data-parallel-size-local=%d" $local)
  "--data-parallel-address=$(LWS_LEADER_ADDRESS)"
  (printf "--data-parallel-rpc-port=%d" (int $v.parallelism.rpcPort))
  "--enable-expert-parallel"
  (printf "--all2all-backend=%s" $v.parallelism.all2allBackend) -}}
{{- if eq .role "worker" }}
# The profile is the leader's. The first rank of a node follows from its place in the group.
command: [sh, -c]
args:
  - >-
    exec vllm serve {{ include "assay.modelFolder" . | default "\"$ASSAY_MODEL\"" }}
    --config={{ include "assay.profilePath" .root }} --headless
    --data-parallel-start-rank=$$((LWS_WORKER_INDEX * {{ $local }}))
    {{ range $group }}{{ . | replace "$(LWS_LEADER_ADDRESS)" "$LWS_LEADER_ADDRESS" }} {{ end }}
    {{- range $v.server.extraArgs }} {{ . | squote }}{{ end }}
{{- else }}
{{- if gt (int $v.server.apiServers) 1 }}
# The image's entrypoint, once the last start's metric files are gone: vLLM would add them up.
command:
  - sh
  - -c
  - rm -rf /run/prometheus/* && exec python -m assay_kernels.launcher.entrypoint "$@"
  - server
{{- end }}
args:
  - --shutdown-timeout={{ $v.drain.seconds }}
  {{- if gt (int $v.server.apiServers) 1 }}
  - --api-server-count={{ $v.server.apiServers }}
  {{- end }}
  {{- if eq .role "leader" }}
  {{- range $group }}
  - {{ . }}
  {{- end }}
  {{- end }}
  {{- range $v.server.extraArgs }}
  - {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "assay.profilePath" -}}
{{- if .Values.profile.inline -}}
/etc/assay/profiles/{{ .Values.profile.name }}.yaml
{{- else -}}
/opt/assay/profiles/{{ .Values.profile.name }}.yaml
{{- end -}}
{{- end }}

{{- define "assay.serverEnv" -}}
{{- $v := .root.Values -}}
- {name: ASSAY_PROFILE, value: {{ if $v.profile.inline }}{{ include "assay.profilePath" .root }}{{ else }}{{ $v.profile.name }}{{ end }}}
{{- with include "assay.modelFolder" . }}
- {name: ASSAY_MODEL, value: {{ . | quote }}}
{{- end }}
{{- with .server.revision }}
- {name: ASSAY_MODEL_REVISION, value: {{ . | quote }}}
{{- end }}
- {name: ASSAY_IMAGE, value: {{ include "assay.serverImage" . | quote }}}
- {name: ASSAY_HOST, value: 0.0.0.0}
- {name: ASSAY_PORT, value: "8000"}
- {name: ASSAY_STATE_DIR, value: /run/assay}
- {name: ASSAY_CACHE_DIR, value: /var/cache/assay}
{{- if eq $v.auth.apiKeys "required" }}
# The mounted file itself, not a copy: the door reads it again when kubelet brings a new version, so keys
# are changed without a restart, which would be a load.
- {name: ASSAY_API_KEYS_FILE, value: /etc/assay/keys/api_keys}
{{- end }}
# The canary beside the server opens the door, not the launcher.
- {name: ASSAY_READY_SUITE, value: canary}
- {name: ASSAY_STALLED_AFTER, value: {{ $v.liveness.stalledAfterSeconds | quote }}}
- {name: STARTUP_BUDGET, value: {{ $v.startup.budgetSeconds | quote }}}
- {name: VLLM_ENGINE_READY_TIMEOUT_S, value: {{ $v.startup.budgetSeconds | quote }}}
# Everything that is compiled or cached goes to the one volume that lasts.
- {name: HOME, value: /var/cache/assay}
- {name: XDG_CACHE_HOME, value: /var/cache/assay}
- {name: VLLM_CACHE_ROOT, value: /var/cache/assay/vllm}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /var/cache/assay/inductor}
- {name: TRITON_CACHE_DIR, value: /var/cache/assay/triton}
- {name: DG_JIT_CACHE_DIR, value: /var/cache/assay/deep_gemm}
{{- if gt (int $v.server.apiServers) 1 }}
# Where the metrics of several API servers meet; without it /metrics answers 500.
- {name: PROMETHEUS_MULTIPROC_DIR, value: /run/prometheus}
{{- end }}
# Weights are on the volume: a server that asks the hub at its start does not start when the hub is down.
- {name: HF_HUB_OFFLINE, value: "1"}
- {name: TRANSFORMERS_OFFLINE, value: "1"}
# Counts requests whose logits held NaN; the alert on corrupted requests needs it.
- {name: VLLM_COMPUTE_NANS_IN_LOGITS, value: "1"}
{{- if gt (int $v.parallelism.nodes) 1 }}
- name: VLLM_HOST_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: NCCL_SOCKET_IFNAME, value: {{ $v.parallelism.socketInterface }}}
- {name: GLOO_SOCKET_IFNAME, value: {{ $v.parallelism.socketInterface }}}
- {name: NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME, value: {{ $v.parallelism.socketInterface }}}
{{- with $v.parallelism.rdmaDevices }}
- {name: NCCL_IB_HCA, value: {{ . | quote }}}
- {name: NVSHMEM_HCA_LIST, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with $v.server.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
