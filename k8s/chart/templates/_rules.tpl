{{/*
The rules, as a Prometheus rule file: prometheusrule-server.yaml wraps it for the operator, and
k8s/rules/assay.rules.yaml is this with monitoring.scope `all`, for a Prometheus outside Kubernetes.
The annotations summary, why and action are the alert table of k8s/README.md.
*/}}

{{/* Matchers of the release's own series, and of kube-state-metrics', kubelet's and DCGM's about it. */}}
{{- define "assay.own" -}}
{{- if eq .Values.monitoring.scope "release" }}assay_release="{{ include "assay.scope" . }}",{{ end -}}
{{- end }}
{{- define "assay.pods" -}}
{{- if eq .Values.monitoring.scope "release" }}namespace="{{ .Release.Namespace }}",pod=~"{{ include "assay.name" . }}-server-.*",{{ end -}}
{{- end }}

{{/* A bucket's bound as vLLM writes it: 1.0, 2.5. */}}
{{- define "assay.le" -}}
{{- $text := printf "%v" . -}}
{{- if contains "." $text }}{{ $text }}{{ else }}{{ $text }}.0{{ end -}}
{{- end }}

{{/* Share of observations above a bucket, over a window; nothing where nothing was observed. */}}
{{- define "assay.slow" -}}
1 - sum by (namespace, assay_release) (rate({{ .metric }}_bucket{le="{{ include "assay.le" .le }}",{{ .own }}}[{{ .window }}])) / (sum by (namespace, assay_release) (rate({{ .metric }}_count{ {{- .own -}} }[{{ .window }}])) > 0)
{{- end }}

{{- define "assay.rules" -}}
{{- $own := include "assay.own" . -}}
{{- $pods := include "assay.pods" . -}}
{{- $o := .Values.objectives -}}
{{- $budget := int .Values.startup.budgetSeconds -}}
groups:
  - name: assay.coherence
    rules:
      - alert: AssayIncoherent
        expr: max by (namespace, pod) (assay_smoke_state{state="incoherent",{{ $own }}}) == 1
        for: 1m
        labels: {severity: critical}
        annotations:
          summary: the canary's suite finds the output incoherent
          why: clients would get fluent nonsense with status 200; the door is shut unless canary.closesDoor is off
          action: read the canary's log for the check that failed; roll back; keep the pod's log and weights for the analysis
      - alert: AssayDoorClosed
        expr: max by (namespace, pod) (assay_smoke_door_open{ {{- $own -}} }) == 0
        for: {{ add $budget 300 }}s
        labels: {severity: critical}
        annotations:
          summary: the door has been shut for longer than a start may take ({{ div (add $budget 300 59) 60 }} minutes)
          why: clients get 503 and nothing will change by itself
          action: ask the canary's /readyz for its reason; then the server's log
      - alert: AssayCorruptedRequests
        expr: sum by (namespace, pod) (increase(vllm:corrupted_requests_total{ {{- $own -}} }[10m])) > 0
        labels: {severity: critical}
        annotations:
          summary: a request's logits held NaN in the last 10 minutes
          why: one is enough; a wrong scale or kernel seldom spoils a single request
          action: take the server out, run `assay-smoke run --tier full` against it, and `assay-kernels audit --deep` on its weights
      - alert: AssayCanaryGone
        expr: max by (namespace, pod) (vllm:num_requests_running{ {{- $own -}} }) >= 0 unless on (namespace, pod) max by (namespace, pod) (assay_smoke_ready{ {{- $own -}} })
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: a server runs and no canary tells of it
          why: nobody would notice that the output went bad
          action: read the canary container's log; it keeps starting the canary anew
      - alert: AssayPluginNotActive
        expr: max by (namespace, pod) (vllm:num_requests_running{ {{- $own -}} }) >= 0 unless on (namespace, pod) max by (namespace, pod) (assay_processes_active{ {{- $own -}} }) > 0
        for: 5m
        labels: {severity: critical}
        annotations:
          summary: vLLM runs without the plugin
          why: vLLM logs a failed plugin import and serves its own kernels, with the faults that the plugin is there for
          action: look for "Failed to load plugin" in the server's log; is ASSAY_REQUIRE set to 0, or VLLM_PLUGINS?
      - alert: AssayWorkersDiffer
        expr: count by (namespace, pod) (assay_info{ {{- $own -}} }) > 1
        for: 5m
        labels: {severity: critical}
        annotations:
          summary: workers of one server run different versions or arithmetic
          why: ranks that compute differently add up to noise
          action: compare the table that each worker logs at its start; restart the server
      - alert: AssaySelfCheckFellBack
        expr: sum by (namespace, pod) (assay_layers{how=~".*reference.*",{{ $own }}}) > 0
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: layers run on the reference path
          why: right, and many times slower; a kernel failed its check, or ASSAY_ARITHMETIC asks for it
          action: read the table in the server's log for the layer and the kernel; report it with GPU, driver and versions
      - alert: AssayServerRefused
        expr: max by (namespace, pod) (kube_pod_container_status_last_terminated_exitcode{container="server",{{ $pods }}}) > 0 and on (namespace, pod) max by (namespace, pod) (increase(kube_pod_container_status_restarts_total{container="server",{{ $pods }}}[1h])) > 0
        labels: {severity: critical}
        annotations:
          summary: the server ended by itself within the last hour
          why: 'the launcher ends what it cannot vouch for: a failed self-check or battery, a missing proof, a dead engine (exit code 1), or what it cannot start (2)'
          action: the last lines of `kubectl logs --previous` name the layer, the check or the rule
  - name: assay.serving
    rules:
      - alert: AssayEngineStalled
        expr: max by (namespace, pod) (assay_smoke_engine{pulse="stalled",{{ $own }}}) == 1
        for: 1m
        labels: {severity: critical}
        annotations:
          summary: requests run and the engine makes no step
          why: /health still says 200; the launcher ends the server after liveness.stalledAfterSeconds
          action: if it repeats, take the last request's prompt lengths from the log and report the hang; check Xid
      - record: assay:errors:ratio_rate5m
        expr: |-
          (
            (sum by (namespace, assay_release) (rate(http_requests_total{handler=~"/v1/.*",status="5xx",{{ $own }}}[5m])) or 0 * sum by (namespace, assay_release) (rate(http_requests_total{handler=~"/v1/.*",{{ $own }}}[5m])))
            + (sum by (namespace, assay_release) (rate(vllm:request_success_total{finished_reason="error",{{ $own }}}[5m])) or 0 * sum by (namespace, assay_release) (rate(http_requests_total{handler=~"/v1/.*",{{ $own }}}[5m])))
          )
          / (sum by (namespace, assay_release) (rate(http_requests_total{handler=~"/v1/.*",{{ $own }}}[5m])) > 0)
      - alert: AssayErrorRatio
        expr: assay:errors:ratio_rate5m{ {{- $own -}} } > {{ $o.errorRatio }}
        for: 5m
        labels: {severity: critical}
        annotations:
          summary: more than {{ mulf $o.errorRatio 100 }} % of requests failed over 5 minutes
          why: answers of 5xx, and streams that broke off
          action: the server's log has the exception; 503 with the door shut shows as AssayDoorClosed too
      {{- range $name, $slo := dict "Ttft" (dict "metric" "vllm:time_to_first_token_seconds" "le" $o.ttftSeconds "what" "first tokens") "Itl" (dict "metric" "vllm:inter_token_latency_seconds" "le" $o.itlSeconds "what" "tokens after the first") }}
      {{- range $window := list "5m" "30m" "1h" "6h" }}
      - record: assay:{{ lower $name }}_slow:ratio_rate{{ $window }}
        expr: {{ include "assay.slow" (dict "metric" $slo.metric "le" $slo.le "own" $own "window" $window) }}
      {{- end }}
      - alert: Assay{{ $name }}BudgetBurnsFast
        expr: assay:{{ lower $name }}_slow:ratio_rate1h{ {{- $own -}} } > {{ printf "%.4g" (mulf 14.4 (subf 1 $o.ratio)) }} and assay:{{ lower $name }}_slow:ratio_rate5m{ {{- $own -}} } > {{ printf "%.4g" (mulf 14.4 (subf 1 $o.ratio)) }}
        labels: {severity: critical}
        annotations:
          summary: so many {{ $slo.what }} took longer than {{ $slo.le }} s, over 5 minutes and over an hour, that two days use up a month's budget
          why: clients notice; 14.4 times the rate at which {{ mulf (subf 1 $o.ratio) 100 | printf "%.3g" }} % of a month would be used up
          action: queue and KV use on the operator's dashboard say whether it is load; if not, compare with the last release
      - alert: Assay{{ $name }}BudgetBurnsSlowly
        expr: assay:{{ lower $name }}_slow:ratio_rate6h{ {{- $own -}} } > {{ printf "%.4g" (mulf 6 (subf 1 $o.ratio)) }} and assay:{{ lower $name }}_slow:ratio_rate30m{ {{- $own -}} } > {{ printf "%.4g" (mulf 6 (subf 1 $o.ratio)) }}
        labels: {severity: warning}
        annotations:
          summary: so many {{ $slo.what }} took longer than {{ $slo.le }} s, over 30 minutes and over 6 hours, that five days use up a month's budget
          why: too slow for a page, too much to leave
          action: more replicas, shorter contexts, or an honest objective
      {{- end }}
      - alert: AssayKvPressure
        expr: max by (namespace, pod) (avg_over_time(vllm:kv_cache_usage_perc{ {{- $own -}} }[10m])) > 0.95 and on (namespace, pod) sum by (namespace, pod) (avg_over_time(vllm:num_requests_waiting{ {{- $own -}} }[10m])) > 0
        for: 5m
        labels: {severity: warning}
        annotations:
          summary: the KV cache is full and requests wait
          why: new requests wait for old ones to end, whatever the GPUs could do
          action: lower --max-model-len or --max-num-seqs, or add a replica
      - alert: AssayPreemptionStorm
        expr: sum by (namespace, pod) (rate(vllm:num_preemptions_total{ {{- $own -}} }[5m])) > 0.2 * (sum by (namespace, pod) (rate(vllm:request_success_total{ {{- $own -}} }[5m])) + 0.05)
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: more than one preemption for five finished requests
          why: preempted requests are computed again; under a storm the server works for nobody
          action: lower --max-num-seqs; KV pressure is the usual cause
      - alert: AssayAcceptanceLengthDrop
        expr: 1 + sum by (namespace, pod) (rate(vllm:spec_decode_num_accepted_tokens_total{ {{- $own -}} }[15m])) / (sum by (namespace, pod) (rate(vllm:spec_decode_num_drafts_total{ {{- $own -}} }[15m])) > 0) < {{ $o.acceptanceLength }}
        for: 15m
        labels: {severity: warning}
        annotations:
          summary: fewer than {{ $o.acceptanceLength }} tokens come of one speculative step
          why: the draft head no longer agrees with the model; after a release, that is often a wrong weight or scale
          action: compare with the last release on the same traffic; run the gate
      - alert: AssayThroughputBelowBaseline
        expr: sum by (namespace, pod) (rate(vllm:generation_tokens_total{ {{- $own -}} }[10m])) < {{ $o.tokensPerSecond }} and on (namespace, pod) sum by (namespace, pod) (avg_over_time(vllm:num_requests_running{ {{- $own -}} }[10m])) >= {{ $o.atRunningRequests }}
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: at {{ $o.atRunningRequests }} running requests and more, a server generates fewer than {{ $o.tokensPerSecond }} tokens/s (objectives.tokensPerSecond; 0 switches it off)
          why: a kernel fell back, a GPU throttles, or the release is slower than promised
          action: the table in the log says which kernels run; DCGM says what the clocks do; run the gate
  - name: assay.platform
    rules:
      - alert: AssayRestartLoop
        expr: max by (namespace, pod, container) (increase(kube_pod_container_status_restarts_total{ {{- $pods -}} }[30m])) > 2
        labels: {severity: critical}
        annotations:
          summary: a container restarted more than twice in 30 minutes
          why: each start of the server is a load of many minutes
          action: "`kubectl logs --previous`; `kubectl describe pod` tells of OOM kills and failed probes"
      - alert: AssayStartupOverBudget
        expr: max by (namespace, pod) (time() - kube_pod_container_state_started{container="server",{{ $pods }}}) > {{ $budget }} and on (namespace, pod) max by (namespace, pod) (kube_pod_status_ready{condition="true",{{ $pods }}}) == 0
        for: 2m
        labels: {severity: warning}
        annotations:
          summary: a server is not ready after startup.budgetSeconds ({{ $budget }} s)
          why: the startup probe ends it, and the next start takes as long
          action: where does the log stop? Weights on a network disk take 30-43 minutes; then raise startup.budgetSeconds
      - alert: AssayDiskAlmostFull
        expr: min by (namespace, persistentvolumeclaim) (kubelet_volume_stats_available_bytes{persistentvolumeclaim=~".*-(weights|cache)(-blue|-green)?",{{ if eq .Values.monitoring.scope "release" }}namespace="{{ .Release.Namespace }}",{{ end }}} / kubelet_volume_stats_capacity_bytes) < 0.05
        for: 10m
        labels: {severity: warning}
        annotations:
          summary: a volume of weights or caches has less than 5 % left
          why: the next revision will not fit, or a kernel cannot be cached and each start compiles again
          action: remove revisions that nothing serves from the weights' volume, or grow it
      - alert: AssayXid
        expr: max by (Hostname, gpu) (changes(DCGM_FI_DEV_XID_ERRORS[15m])) > 0 and on (Hostname, gpu) max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS) > 0
        labels: {severity: critical}
        annotations:
          summary: the driver reported an Xid error on a GPU
          why: a worker may be dead while its server still says healthy; 48, 63, 64, 74, 79, 94 and 95 are hardware
          action: look the number up in NVIDIA's Xid list; drain the node for a hardware one, restart the server for the rest
{{- end }}
