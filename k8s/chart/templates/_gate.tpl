{{/*
The pod of the gate. Takes (dict "root" $ "records" bool "url" text). Only a gate that records has an
account's token, projected for it alone; the Role behind it can do nothing but keep verdicts.
*/}}
{{- define "assay.gatePod" -}}
{{- $v := .root.Values -}}
{{- $judged := include "assay.judged" .root | fromJson -}}
{{- $server := dict "root" .root "server" $judged -}}
{{- include "assay.podBasics" .root }}
serviceAccountName: {{ include "assay.name" .root }}-gate
automountServiceAccountToken: false
restartPolicy: Never
containers:
  - name: gate
    image: {{ include "assay.gateImage" .root }}
    imagePullPolicy: {{ $v.images.gate.pullPolicy }}
    command: [python, /etc/assay/scripts/release_gate.py]
    args:
      - run
      - /results
      - {{ .url | quote }}
      - {{ include "assay.progressDeadline" .root | quote }}
      - --
      - assay-gate
      - run
      - --policy={{ if $v.gate.inlinePolicy }}/etc/assay/policy/{{ $v.gate.policy }}.yaml{{ else }}{{ $v.gate.policy }}{{ end }}
      - --url={{ .url }}
      - --hardware={{ $v.gate.hardware }}
      - --out=/results
      {{- if $v.gate.baselineConfigMap }}
      - --baseline=/etc/assay/baseline/{{ $v.gate.baselineKey }}
      {{- end }}
    env:
      # What the verdict names (assay-gate's --image and --model-revision).
      - {name: ASSAY_IMAGE, value: {{ include "assay.serverImage" $server | quote }}}
      - {name: ASSAY_MODEL_REVISION, value: {{ $judged.revision | quote }}}
      {{- include "assay.verdictEnv" (dict "root" .root "server" $judged) | nindent 6 }}
      - {name: HOME, value: /tmp}
      - {name: MPLCONFIGDIR, value: /tmp/matplotlib}
    securityContext:
      {{- include "assay.containerSecurity" .root | nindent 6 }}
    resources:
      {{- toYaml $v.gate.resources | nindent 6 }}
    volumeMounts:
      - {name: results, mountPath: /results}
      - {name: tmp, mountPath: /tmp}
      - {name: scripts, mountPath: /etc/assay/scripts, readOnly: true}
      {{- if eq $v.auth.apiKeys "required" }}
      - {name: keys, mountPath: /etc/assay/keys, readOnly: true}
      {{- end }}
      {{- if $v.gate.inlinePolicy }}
      - {name: policy, mountPath: /etc/assay/policy, readOnly: true}
      {{- end }}
      {{- if $v.gate.baselineConfigMap }}
      - {name: baseline, mountPath: /etc/assay/baseline, readOnly: true}
      {{- end }}
      {{- if .records }}
      - {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
      {{- end }}
volumes:
  - name: results
    emptyDir: {sizeLimit: 512Mi}
  - name: tmp
    emptyDir: {sizeLimit: 512Mi}
  - name: scripts
    configMap: {name: {{ include "assay.name" .root }}-scripts}
  {{- if eq $v.auth.apiKeys "required" }}
  - name: keys
    secret:
      secretName: {{ $v.auth.existingSecret }}
      defaultMode: 0440
      items: [{key: api_keys, path: api_keys}]
  {{- end }}
  {{- if $v.gate.inlinePolicy }}
  - name: policy
    configMap: {name: {{ include "assay.name" .root }}-policy}
  {{- end }}
  {{- with $v.gate.baselineConfigMap }}
  - name: baseline
    configMap: {name: {{ . }}}
  {{- end }}
  {{- if .records }}
  {{- include "assay.accountVolume" .root | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "assay.verdictEnv" -}}
- {name: RELEASE, value: {{ .root.Release.Name | quote }}}
- {name: VERDICTS, value: {{ include "assay.name" .root }}-verdicts}
- {name: IDENTITY, value: {{ include "assay.identity" . }}}
{{- end }}

{{/* The token, and what is needed to use it; short-lived. */}}
{{- define "assay.accountVolume" -}}
- name: account
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{- define "assay.gateUrl" -}}
{{- if .Values.blueGreen.enabled -}}
http://{{ include "assay.name" . }}-preview:8000
{{- else -}}
http://{{ include "assay.name" . }}-api:{{ .Values.service.port }}
{{- end -}}
{{- end }}
