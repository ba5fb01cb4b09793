{{/*
The pod of a server. Takes (dict "root" $ "server" variant "role" "single" | "leader" | "worker").
A worker of a group of nodes runs engines and no API: no door, no canary, no readiness of its own.
*/}}
{{- define "assay.podTemplate" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $labels := dict "root" $root "component" (eq .role "worker" | ternary "engine" "server") "colour" .server.colour -}}
metadata:
  labels:
    {{- include "assay.labels" $labels | nindent 4 }}
  annotations:
    # A pod reads profile and scripts once: new ones need a new pod.
    checksum/files: {{ include "assay.filesChecksum" $root }}
spec:
  {{- include "assay.podBasics" $root | trim | nindent 2 }}
  serviceAccountName: {{ include "assay.name" $root }}-server
  # Nothing in the pod talks to the API server.
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ include "assay.grace" $root }}
  {{- include "assay.scheduling" $root | trim | nindent 2 }}
  {{- if eq $v.weights.source "download" }}
  initContainers:
    {{- include "assay.waitForWeights" . | nindent 4 }}
  {{- end }}
  containers:
    {{- include "assay.serverContainer" . | nindent 4 }}
    {{- if ne .role "worker" }}
    {{- include "assay.canaryContainer" . | nindent 4 }}
    {{- end }}
  {{- if $v.gpu.dra.enabled }}
  resourceClaims:
    - name: gpus
      resourceClaimTemplateName: {{ include "assay.name" $root }}-gpus
  {{- end }}
  volumes:
    {{- include "assay.serverVolumes" . | trim | nindent 4 }}
{{- end }}

{{- define "assay.scheduling" -}}
{{- with .Values.scheduling.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.scheduling.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.scheduling.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.scheduling.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.scheduling.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .Values.gpu.count .Values.gpu.products }}
affinity:
  nodeAffinity:
    # A profile fits one kind of GPU: on another, the preflight would refuse after the image was pulled.
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        - matchExpressions:
            - key: nvidia.com/gpu.product
              operator: In
              values: {{ .Values.gpu.products | toJson }}
{{- end }}
{{- end }}

{{- define "assay.waitForWeights" -}}
- name: wait-for-weights
  image: {{ include "assay.serverImage" . }}
  imagePullPolicy: {{ .root.Values.images.server.pullPolicy }}
  command: [sh, /etc/assay/scripts/wait_for_weights.sh]
  args: [{{ include "assay.modelFolder" . | quote }}, {{ .root.Values.weights.download.budgetSeconds | quote }}]
  securityContext:
    {{- include "assay.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 32Mi, ephemeral-storage: 16Mi}
    limits: {cpu: 100m, memory: 64Mi, ephemeral-storage: 16Mi}
  volumeMounts:
    - {name: weights, mountPath: /models, readOnly: true}
    - {name: scripts, mountPath: /etc/assay/scripts, readOnly: true}
{{- end }}

{{- define "assay.serverContainer" -}}
{{- $v := .root.Values -}}
- name: server
  image: {{ include "assay.serverImage" . }}
  imagePullPolicy: {{ $v.images.server.pullPolicy }}
  {{- include "assay.serverCommand" . | trim | nindent 2 }}
  env:
    {{- include "assay.serverEnv" . | nindent 4 }}
  {{- if ne .role "worker" }}
  ports:
    - {name: http, containerPort: 8000}
  # vLLM's port opens when the engine is ready: until then nobody but this probe asks.
  startupProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: {{ $v.startup.periodSeconds }}
    timeoutSeconds: 10
    failureThreshold: {{ include "assay.startupFailures" .root }}
  # Dead, not busy: /health is answered by the API server while the engine computes, and three times 10 s
  # are longer than any pause of its own. A dead or frozen engine is the launcher's to end (ASSAY_STALLED_AFTER).
  livenessProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 20
    timeoutSeconds: 10
    failureThreshold: 3
  # On a real answer: the door opens after the canary's suite has passed.
  readinessProbe:
    exec:
      command: [python, /etc/assay/scripts/ready.py, /run/assay/run/open, "http://127.0.0.1:8090/readyz"]
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 2
  lifecycle:
    preStop:
      # Endpoints are taken away while SIGTERM is sent; proxies go on sending for some seconds.
      exec: {command: [sleep, {{ $v.drain.preStopSeconds | quote }}]}
  {{- end }}
  securityContext:
    {{- if and (gt (int $v.parallelism.nodes) 1) $v.parallelism.rdma.ipcLock }}
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      # RDMA pins memory. One node needs none of this, and stays "restricted".
      add: [IPC_LOCK]
    {{- else }}
    {{- include "assay.containerSecurity" . | nindent 4 }}
    {{- end }}
  resources:
    {{- include "assay.serverResources" .root | nindent 4 }}
  volumeMounts:
    {{- if ne $v.weights.source "image" }}
    - {name: weights, mountPath: /models, readOnly: true}
    {{- end }}
    - {name: cache, mountPath: /var/cache/assay}
    - {name: run, mountPath: /run/assay}
    - {name: shm, mountPath: /dev/shm}
    - {name: tmp, mountPath: /tmp}
    {{- if gt (int $v.server.apiServers) 1 }}
    - {name: metrics, mountPath: /run/prometheus}
    {{- end }}
    - {name: scripts, mountPath: /etc/assay/scripts, readOnly: true}
    {{- if $v.profile.inline }}
    - {name: profile, mountPath: /etc/assay/profiles, readOnly: true}
    {{- end }}
    {{- if and (eq $v.auth.apiKeys "required") (ne .role "worker") }}
    - {name: keys, mountPath: /etc/assay/keys, readOnly: true}
    {{- end }}
{{- end }}

{{- define "assay.canaryContainer" -}}
{{- $v := .root.Values -}}
- name: canary
  image: {{ include "assay.gateImage" .root }}
  imagePullPolicy: {{ $v.images.gate.pullPolicy }}
  command: [sh, /etc/assay/scripts/canary.sh, /run/assay/bypass.key]
  args:
    - --url=http://127.0.0.1:8000
    - --suite={{ $v.canary.suite }}
    - --door=/run/assay/run
    - --listen=0.0.0.0:8090
    - --interval={{ $v.canary.intervalSeconds }}
    - --fail-after={{ $v.canary.failAfter }}
    - --recover-after={{ $v.canary.recoverAfter }}
    - --outage-after={{ $v.canary.outageAfter }}
    - --tokens-per-hour={{ $v.canary.tokensPerHour }}
    {{- if not $v.canary.closesDoor }}
    - --never-close
    {{- end }}
  ports:
    - {name: canary, containerPort: 8090}
  # No readiness probe: a canary that has gone must not make the pod unready (files/ready.py).
  startupProbe:
    httpGet: {path: /healthz, port: canary}
    # It begins when the server has written its key, and the server's image may still be on its way.
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: {{ div (add (include "assay.pullSeconds" .root | int) 120) 10 }}
  livenessProbe:
    httpGet: {path: /healthz, port: canary}
    periodSeconds: 30
    timeoutSeconds: 10
    failureThreshold: 3
  securityContext:
    {{- include "assay.containerSecurity" . | nindent 4 }}
  resources:
    {{- toYaml $v.canary.resources | nindent 4 }}
  volumeMounts:
    - {name: run, mountPath: /run/assay}
    - {name: scripts, mountPath: /etc/assay/scripts, readOnly: true}
    - {name: tmp-canary, mountPath: /tmp}
{{- end }}

{{- define "assay.serverVolumes" -}}
{{- $v := .root.Values -}}
{{- if eq $v.weights.source "hostPath" }}
- name: weights
  hostPath: {path: {{ $v.weights.hostPath.path | quote }}, type: Directory}
{{- else if ne $v.weights.source "image" }}
- name: weights
  persistentVolumeClaim: {claimName: {{ include "assay.weightsClaim" . }}, readOnly: true}
{{- end }}
- name: cache
  {{- if $v.cache.persistent }}
  persistentVolumeClaim: {claimName: {{ include "assay.cacheClaim" . }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $v.cache.size }}}
  {{- end }}
# Keys and the door's sign: in memory, gone with the pod.
- name: run
  emptyDir: {medium: Memory, sizeLimit: 64Mi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ $v.server.shmSize }}}
- name: tmp
  emptyDir: {sizeLimit: 4Gi}
- name: tmp-canary
  emptyDir: {sizeLimit: 128Mi}
{{- if gt (int $v.server.apiServers) 1 }}
# Metric files are mapped into memory by several processes: a local disk, never a network volume.
- name: metrics
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
- name: scripts
  configMap: {name: {{ include "assay.name" .root }}-scripts}
{{- if $v.profile.inline }}
- name: profile
  configMap: {name: {{ include "assay.name" .root }}-profile}
{{- end }}
{{- if eq $v.auth.apiKeys "required" }}
- name: keys
  # 0440 with fsGroup: the server is not root, and nobody else in the pod may read them.
  secret:
    secretName: {{ $v.auth.existingSecret }}
    defaultMode: 0440
    items: [{key: api_keys, path: api_keys}]
{{- end }}
{{- end }}

{{- define "assay.filesChecksum" -}}
{{- list .Values.profile.inline .Values.profile.inlineEnv (.Files.Get "files/ready.py") (.Files.Get "files/canary.sh") (.Files.Get "files/wait_for_weights.sh") | toJson | sha256sum | trunc 16 -}}
{{- end }}
