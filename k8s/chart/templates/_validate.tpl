{{/* Values that do not go together, each with the rule. Included once, by the Service. */}}
{{- define "assay.validate" -}}
{{- $v := .Values -}}
{{- $budget := "startup.budgetSeconds" -}}
{{- $owned := dict
  "--shutdown-timeout" "drain.seconds" "--api-server-count" "server.apiServers" "--api-key" "auth.existingSecret"
  "--host" "the launcher" "--port" "the launcher" "--middleware" "the launcher" "--config" "profile.name"
  "--headless" "parallelism.nodes" -}}
{{- if gt (int $v.parallelism.nodes) 1 -}}
{{- $owned = merge $owned (dict
  "--data-parallel-size" "parallelism.nodes" "--data-parallel-size-local" "gpu.count"
  "--data-parallel-address" "parallelism.nodes" "--data-parallel-rpc-port" "parallelism.rpcPort"
  "--data-parallel-start-rank" "parallelism.nodes" "--all2all-backend" "parallelism.all2allBackend") -}}
{{- end -}}
{{- range $argument := $v.server.extraArgs -}}
{{- $flag := (splitList "=" $argument | first | replace "_" "-") -}}
{{- if hasKey $owned $flag -}}
{{- fail (printf "server.extraArgs: %s is set by %s" $flag (get $owned $flag)) -}}
{{- end -}}
{{- end -}}
{{- $ownedVariables := dict
  "VLLM_ENGINE_READY_TIMEOUT_S" $budget "STARTUP_BUDGET" $budget "ASSAY_STALLED_AFTER" "liveness.stalledAfterSeconds"
  "ASSAY_READY_SUITE" "canary.suite" "ASSAY_PROFILE" "profile.name" "ASSAY_MODEL" "weights.source"
  "ASSAY_STATE_DIR" "the chart" "ASSAY_API_KEYS_FILE" "auth.existingSecret" "ASSAY_PORT" "the chart"
  "PROMETHEUS_MULTIPROC_DIR" "the chart" "HF_HUB_OFFLINE" "the chart" -}}
{{- range $v.server.extraEnv -}}
{{- if hasKey $ownedVariables .name -}}
{{- fail (printf "server.extraEnv: %s is set by %s" .name (get $ownedVariables .name)) -}}
{{- end -}}
{{- if and (hasKey . "value") (regexMatch "(?i)(token|secret|password|passwd|api_?key|credential)" .name) -}}
{{- fail (printf "server.extraEnv: %s looks like a secret and stands there in the clear; use valueFrom.secretKeyRef" .name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.weights.source "download") (not $v.model.revision) -}}
{{- $missing := true -}}
{{- if $v.blueGreen.enabled -}}
{{- $missing = or (and $v.blueGreen.blue.enabled (not $v.blueGreen.blue.revision)) (and $v.blueGreen.green.enabled (not $v.blueGreen.green.revision)) -}}
{{- end -}}
{{- if $missing -}}
{{- fail "model.revision: a download needs the 40 hex digits of a commit; a branch moves, and what was gated would not be what is served" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.weights.source "claim") (not $v.weights.claim.name) -}}
{{- fail "weights.claim.name: source `claim` needs the name of a PersistentVolumeClaim" -}}
{{- end -}}
{{- if eq $v.weights.source "hostPath" -}}
{{- if not $v.weights.hostPath.path }}{{ fail "weights.hostPath.path: source `hostPath` needs a folder of the node" }}{{ end -}}
{{- if ne $v.weights.hostPath.acknowledge "the namespace is privileged" -}}
{{- fail "weights.hostPath.acknowledge: a host path needs a namespace with the label pod-security.kubernetes.io/enforce=privileged; write `the namespace is privileged` if that is so" -}}
{{- end -}}
{{- end -}}
{{- if $v.blueGreen.enabled -}}
{{- if gt (int $v.parallelism.nodes) 1 }}{{ fail "blueGreen.enabled: not together with parallelism.nodes > 1; install the new version as a release of its own" }}{{ end -}}
{{- if or (ne (int $v.replicas) 1) $v.autoscaling.enabled }}{{ fail "blueGreen.enabled: one replica of each colour, without autoscaling" }}{{ end -}}
{{- if not (get $v.blueGreen $v.blueGreen.active).enabled }}{{ fail (printf "blueGreen.active: %s is not enabled, so the Service would have no server" $v.blueGreen.active) }}{{ end -}}
{{- if eq $v.weights.source "claim" }}{{ fail "blueGreen.enabled: each colour needs a volume of its own on its node, so weights.source `claim` does not go with it" }}{{ end -}}
{{- if $v.cache.existingClaim }}{{ fail "blueGreen.enabled: each colour needs a cache of its own, so cache.existingClaim does not go with it" }}{{ end -}}
{{- end -}}
{{- $many := or (gt (int $v.replicas) 1) (gt (int $v.parallelism.nodes) 1) $v.autoscaling.enabled -}}
{{- $shared := or (has "ReadWriteMany" $v.weights.volume.accessModes) (has "ReadOnlyMany" $v.weights.volume.accessModes) -}}
{{- if and $many (eq $v.weights.source "download") (not $shared) -}}
{{- fail "weights.volume.accessModes: several nodes read the weights, so ReadWriteMany is needed; or fill a volume on each node and use source `claim`" -}}
{{- end -}}
{{- if and $many $v.cache.persistent (not $v.cache.existingClaim) -}}
{{- fail "cache.persistent: several pods cannot share the chart's ReadWriteOnce volume; name a ReadWriteMany claim in cache.existingClaim, or set it to false" -}}
{{- end -}}
{{- if and (gt (int $v.parallelism.nodes) 1) (lt (int $v.gpu.count) 1) }}{{ fail "parallelism.nodes: several nodes need GPUs; gpu.count is 0" }}{{ end -}}
{{- if and $v.gpu.dra.enabled (lt (int $v.gpu.count) 1) }}{{ fail "gpu.dra.enabled: gpu.count is 0" }}{{ end -}}
{{- if and $v.autoscaling.enabled (lt (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas)) }}{{ fail "autoscaling.maxReplicas: less than autoscaling.minReplicas" }}{{ end -}}
{{- if $v.route.enabled -}}
{{- if not $v.route.parentRefs }}{{ fail "route.parentRefs: a route without a gateway leads nowhere" }}{{ end -}}
{{- if and $v.route.inferencePool (not $v.route.endpointPicker) }}{{ fail "route.endpointPicker: an InferencePool needs the Service of its endpoint picker" }}{{ end -}}
{{- end -}}
{{- if and $v.profile.inlineEnv (not $v.profile.inline) }}{{ fail "profile.inlineEnv: stands beside profile.inline, which is empty" }}{{ end -}}
{{- if not $v.auth.existingSecret -}}
{{- if eq $v.auth.apiKeys "required" }}{{ fail "auth.existingSecret: keys are required (auth.apiKeys), so the Secret that holds them must be named" }}{{ end -}}
{{- end -}}
{{- range $what := list "server.resources" "canary.resources" "gate.resources" "weights.download.resources" -}}
{{- $node := $v -}}
{{- range splitList "." $what }}{{ $node = get $node . }}{{ end -}}
{{- range $limit := list "cpu" "memory" "ephemeral-storage" -}}
{{- if not (dig "limits" $limit "" $node) }}{{ fail (printf "%s.limits: %s is missing; a container without a limit can take its node down" $what $limit) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end }}
