"""The two dashboards, panel by panel: title, kind, unit, and {legend: expression}.

`SEL` stands for the matchers of the chosen release, `POD` for those of its pods. Grafana replaces
$release and $__rate_interval.
"""

# ruff: noqa: E501 (a query is read best in one piece)
# fmt: off
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["stat", "timeseries", "state-timeline", "table"]
SEL = 'assay_release=~"$release"'
POD = 'pod=~"$pod"'
HEIGHT = 7
WIDTH = 8
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    title: str
    kind: Kind
    unit: str
    queries: dict[str, str]
    about: str = ""


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


def quantiles(metric: str) -> dict[str, str]:
    return {
        f"p{round(q * 100)}": f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{SEL}}[{RATE}])))"
        for q in (0.5, 0.9, 0.99)
    }


OPERATOR = (
    Row("Is it sound?", (
        Panel("Ready", "stat", "bool_yes_no", {"{{pod}}": "min by (pod) (assay_smoke_ready{SEL})"},
              "Clients may be answered: the canary's suite has passed, and the door is open"),
        Panel("Canary's state", "state-timeline", "short", {"{{state}}": "max by (pod, state) (assay_smoke_state{SEL})"}),
        Panel("Door", "state-timeline", "bool", {"{{pod}}": "max by (pod) (assay_smoke_door_open{SEL})"}),
        Panel("Last good answer", "stat", "s", {"{{pod}}": "time() - max by (pod) (assay_smoke_last_good_timestamp_seconds{SEL} > 0)"}),
        Panel("Checks", "table", "bool_yes_no", {"{{check}}": "min by (check) (assay_smoke_check_success{SEL})"}),
        Panel("Engine", "state-timeline", "bool", {"{{pulse}}": "max by (pod, pulse) (assay_smoke_engine{SEL})"},
              "Busy makes steps; stalled has requests running and makes none"),
        Panel("Requests with NaN logits", "timeseries", "short", {"{{pod}}": f"sum by (pod) (increase(vllm:corrupted_requests_total{{SEL}}[{RATE}]))"}),
        Panel("vLLM processes with the plugin", "stat", "short", {"{{pod}}": "max by (pod) (assay_processes_active{SEL})"}),
        Panel("Alerts that fire", "table", "short", {"{{alertname}}": 'sum by (alertname, severity) (ALERTS{alertname=~"Assay.*",alertstate="firing"})'}),
    )),
    Row("Traffic", (
        Panel("Requests running and waiting", "timeseries", "short", {
            "running": "sum(vllm:num_requests_running{SEL})", "waiting": "sum(vllm:num_requests_waiting{SEL})"}),
        Panel("Requests ended, by reason", "timeseries", "reqps", {"{{finished_reason}}": f"sum by (finished_reason) (rate(vllm:request_success_total{{SEL}}[{RATE}]))"}),
        Panel("HTTP answers", "timeseries", "reqps", {"{{status}}": f'sum by (status) (rate(http_requests_total{{handler=~"/v1/.*",SEL}}[{RATE}]))'}),
        Panel("Tokens", "timeseries", "short", {
            "generated": f"sum(rate(vllm:generation_tokens_total{{SEL}}[{RATE}]))",
            "prompt": f"sum(rate(vllm:prompt_tokens_total{{SEL}}[{RATE}]))"}, "Tokens a second"),
        Panel("Time to first token", "timeseries", "s", quantiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "timeseries", "s", quantiles("vllm:inter_token_latency_seconds")),
        Panel("End to end", "timeseries", "s", quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Time in the queue", "timeseries", "s", quantiles("vllm:request_queue_time_seconds")),
        Panel("Failed requests", "timeseries", "percentunit", {"{{assay_release}}": "assay:errors:ratio_rate5m{SEL}"}),
    )),
    Row("Memory and speculation", (
        Panel("KV cache in use", "timeseries", "percentunit", {"{{pod}}": "max by (pod) (vllm:kv_cache_usage_perc{SEL})"}),
        Panel("Preemptions", "timeseries", "ops", {"{{pod}}": f"sum by (pod) (rate(vllm:num_preemptions_total{{SEL}}[{RATE}]))"}),
        Panel("Prefix cache hits", "timeseries", "percentunit", {"hits": f"sum(rate(vllm:prefix_cache_hits_total{{SEL}}[{RATE}])) / (sum(rate(vllm:prefix_cache_queries_total{{SEL}}[{RATE}])) > 0)"}),
        Panel("Acceptance length", "timeseries", "short", {"tokens a step": f"1 + sum(rate(vllm:spec_decode_num_accepted_tokens_total{{SEL}}[{RATE}])) / (sum(rate(vllm:spec_decode_num_drafts_total{{SEL}}[{RATE}])) > 0)"},
              "Empty for a server that does not speculate"),
    )),
    Row("Platform", (
        Panel("GPU use", "timeseries", "percent", {"{{Hostname}} {{gpu}}": "avg by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL)"}),
        Panel("GPU memory", "timeseries", "decmbytes", {"{{Hostname}} {{gpu}}": "max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED)"}),
        Panel("GPU power", "timeseries", "watt", {"{{Hostname}} {{gpu}}": "max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)"}),
        Panel("Last Xid", "stat", "short", {"{{Hostname}} {{gpu}}": "max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS)"}),
        Panel("Restarts", "timeseries", "short", {"{{pod}} {{container}}": "max by (pod, container) (kube_pod_container_status_restarts_total{POD})"}),
        Panel("Free on volumes", "timeseries", "percentunit", {"{{persistentvolumeclaim}}": 'min by (persistentvolumeclaim) (kubelet_volume_stats_available_bytes{persistentvolumeclaim=~".*-(weights|cache).*"} / kubelet_volume_stats_capacity_bytes)'}),
    )),
)

RELEASE = (
    Row("What is released", (
        Panel("Version, architecture, arithmetic", "table", "short", {"{{version}} {{arch}} {{mode}} {{operators}}": "max by (assay_release, version, arch, mode, operators) (assay_info{SEL})"}),
        Panel("Layers and their kernels", "table", "short", {"{{kind}}: {{how}}": "sum by (assay_release, kind, how) (assay_layers{SEL})"}),
        Panel("Server restarts seen by the canary", "timeseries", "short", {"{{pod}}": f"sum by (pod) (increase(assay_smoke_server_restarts_total{{SEL}}[{RATE}]))"}),
    )),
    Row("Coherence, release against release", (
        Panel("Probes", "timeseries", "short", {"{{tier}} {{verdict}}": f"sum by (tier, verdict) (increase(assay_smoke_probes_total{{SEL}}[{RATE}]))"}),
        Panel("Checks that did not pass", "timeseries", "short", {"{{check}}": f'sum by (check) (increase(assay_smoke_checks_total{{verdict="fail",SEL}}[{RATE}]))'}),
        Panel("KL from the reference", "timeseries", "short", {"{{assay_release}}": "max by (assay_release) (assay_smoke_kl_mean_nats{SEL})"}, "Mean, in nats; empty without a recorded reference"),
        Panel("Top-1 agreement", "timeseries", "percentunit", {"{{assay_release}}": "min by (assay_release) (assay_smoke_top1_share{SEL})"}),
        Panel("Repetition", "timeseries", "percentunit", {"{{assay_release}}": "max by (assay_release) (assay_smoke_repetition_ratio{SEL})"}, "Share of 5-grams of a long answer that repeat"),
        Panel("Acceptance length", "timeseries", "short", {"{{assay_release}}": f"1 + sum by (assay_release) (rate(vllm:spec_decode_num_accepted_tokens_total{{SEL}}[{RATE}])) / (sum by (assay_release) (rate(vllm:spec_decode_num_drafts_total{{SEL}}[{RATE}])) > 0)"}),
    )),
    Row("Speed and promises", (
        Panel("Generated tokens", "timeseries", "short", {"{{assay_release}}": f"sum by (assay_release) (rate(vllm:generation_tokens_total{{SEL}}[{RATE}]))"}, "Tokens a second"),
        Panel("Tokens a second for each running request", "timeseries", "short", {"{{assay_release}}": f"sum by (assay_release) (rate(vllm:generation_tokens_total{{SEL}}[{RATE}])) / (sum by (assay_release) (avg_over_time(vllm:num_requests_running{{SEL}}[{RATE}])) > 0)"}),
        Panel("Tokens a step", "timeseries", "short", {"{{assay_release}}": f"sum by (assay_release) (rate(vllm:iteration_tokens_total_sum{{SEL}}[{RATE}])) / (sum by (assay_release) (rate(vllm:iteration_tokens_total_count{{SEL}}[{RATE}])) > 0)"}),
        Panel("First tokens later than promised", "timeseries", "percentunit", {
            "an hour": "assay:ttft_slow:ratio_rate1h{SEL}", "5 minutes": "assay:ttft_slow:ratio_rate5m{SEL}"}),
        Panel("Further tokens later than promised", "timeseries", "percentunit", {
            "an hour": "assay:itl_slow:ratio_rate1h{SEL}", "5 minutes": "assay:itl_slow:ratio_rate5m{SEL}"}),
        Panel("Failed requests", "timeseries", "percentunit", {"{{assay_release}}": "assay:errors:ratio_rate5m{SEL}"}),
    )),
    Row("What the canary costs", (
        Panel("Tokens that probes cost", "timeseries", "short", {"{{kind}}": f"sum by (kind) (rate(assay_smoke_tokens_total{{SEL}}[{RATE}]))"}, "Tokens a second"),
        Panel("Time of a probe", "timeseries", "s", {"p50": f"histogram_quantile(0.5, sum by (le) (rate(assay_smoke_probe_seconds_bucket{{SEL}}[{RATE}])))", "p99": f"histogram_quantile(0.99, sum by (le) (rate(assay_smoke_probe_seconds_bucket{{SEL}}[{RATE}])))"}),
        Panel("Probes left out", "timeseries", "short", {"{{pod}}": f"sum by (pod) (increase(assay_smoke_probes_skipped_total{{SEL}}[{RATE}]))"}, "For want of tokens (canary.tokensPerHour)"),
    )),
)

DASHBOARDS = {
    "operator": ("Assay: operator", OPERATOR),
    "release": ("Assay: release engineer", RELEASE),
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def expression(text: str) -> str:
    return text.replace("SEL}", f"{SEL}}}").replace("POD}", f"{POD}}}")


def dashboard(name: str) -> dict[str, Any]:
    """Grafana's JSON, schema 39 (Grafana 11)."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(_place({"type": "row", "title": row.title, "collapsed": False, "panels": []}, 0, y, 24, 1))
        y += 1
        for place, panel in enumerate(row.panels):
            x, line = place % 3 * WIDTH, place // 3 * HEIGHT
            panels.append(_place(_panel(panel), x, y + line, WIDTH, HEIGHT))
        y += -(-len(row.panels) // 3) * HEIGHT
    for number, panel_json in enumerate(panels, 1):
        panel_json["id"] = number
    return {
        "uid": f"assay-{name}", "title": title, "tags": ["assay"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "timezone": "",
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            _variable("release", "label_values(assay_smoke_ready, assay_release)"),
            _variable("pod", f"label_values(assay_smoke_ready{{{SEL}}}, pod)"),
        ]},
        "annotations": {"list": []},
        "panels": panels,
    }  # fmt: skip


def _variable(name: str, query: str) -> dict[str, Any]:
    # `.*` for all: outside Kubernetes the series have no such label, and an empty one matches.
    return {"name": name, "type": "query", "datasource": SOURCE, "query": {"query": query, "refId": name},
            "refresh": 2, "includeAll": True, "allValue": ".*", "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]}}  # fmt: skip


def _place(panel: dict[str, Any], x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return panel | {"gridPos": {"x": x, "y": y, "w": w, "h": h}}


def _panel(panel: Panel) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table")
    targets = [
        {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expression(text),
         "legendFormat": legend, "instant": instant, "range": not instant,
         **({"format": "table"} if panel.kind == "table" else {})}
        for number, (legend, text) in enumerate(panel.queries.items())
    ]  # fmt: skip
    found = {
        "type": panel.kind, "title": panel.title, "datasource": SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []}, "options": {},
    }  # fmt: skip
    return found | ({"description": panel.about} if panel.about else {})
