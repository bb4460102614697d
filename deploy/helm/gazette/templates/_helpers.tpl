{{- define "gazette.name" -}}
{{- if contains "gazette" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-gazette" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "gazette.selector" -}}
app.kubernetes.io/name: gazette
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "gazette.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "gazette.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* One object: its text as YAML, with the values of `merge` over it. */ -}}
{{- define "gazette.object" -}}
{{- $object := fromYaml .text -}}
{{- if hasKey $object "Error" }}{{ fail (printf "%s in:\n%s" $object.Error .text) }}{{ end -}}
{{ toYaml (mergeOverwrite $object (deepCopy (.merge | default dict))) }}
{{- end }}

{{- define "gazette.podSecurity" -}}
automountServiceAccountToken: false
# Kubernetes sets variables such as BROKER_PORT for a Service of that name, which would be options.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "gazette.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "gazette.fieldVariables" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- end }}

{{- define "gazette.zoneVariable" -}}
- name: ZONE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
{{- end }}

{{- define "gazette.etcdAddress" -}}
{{- if .Values.etcd.endpoints }}{{ join "," .Values.etcd.endpoints }}{{ else -}}
{{- $name := printf "%s-etcd" (include "gazette.name" .) -}}
{{- $addresses := list -}}
{{- range until (int .Values.etcd.members) -}}
{{- $addresses = append $addresses (printf "http://%s-%d.%s-members.$(NAMESPACE).svc:2379" $name . $name) -}}
{{- end -}}
{{ join "," $addresses }}
{{- end }}
{{- end }}

{{- /* Options of brokers and consumers for Etcd and logs. */ -}}
{{- define "gazette.commonArguments" -}}
- --etcd.address={{ include "gazette.etcdAddress" . }}
- --etcd.lease={{ .Values.etcd.lease }}
{{- if .Values.etcd.tls.secretName }}
- --etcd.trusted-ca-file=/etc/gazette/etcd/ca.crt
{{- if .Values.etcd.tls.clientCertificate }}
- --etcd.cert-file=/etc/gazette/etcd/tls.crt
- --etcd.cert-key-file=/etc/gazette/etcd/tls.key
{{- end }}
{{- end }}
{{- with .Values.etcd.auth }}
{{- if .user }}
- --etcd.user={{ .user }}
- --etcd.password-file=/etc/gazette/etcd-auth/password
{{- end }}
{{- end }}
- --log.level={{ .Values.log.level }}
- --log.format={{ .Values.log.format }}
{{- end }}

{{- /* Secrets of brokers and consumers, as directories: they are replaced while a process runs. */ -}}
{{- define "gazette.secretVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if .Values.authKeys.secretName }}
- name: keys
  secret: {secretName: {{ .Values.authKeys.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.etcd.tls.secretName }}
- name: etcd
  secret: {secretName: {{ .Values.etcd.tls.secretName }}, defaultMode: 0440}
{{- end }}
{{- if .Values.etcd.auth.user }}
- name: etcd-auth
  secret: {secretName: {{ .Values.etcd.auth.secretName }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "gazette.secretMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.authKeys.secretName }}
- {name: keys, mountPath: /etc/gazette/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/gazette/tls, readOnly: true}
{{- end }}
{{- if .Values.etcd.tls.secretName }}
- {name: etcd, mountPath: /etc/gazette/etcd, readOnly: true}
{{- end }}
{{- if .Values.etcd.auth.user }}
- {name: etcd-auth, mountPath: /etc/gazette/etcd-auth, readOnly: true}
{{- end }}
{{- end }}

{{- /* Probes at `port`. A liveness of 60 s is longer than a lease of 20 s. */ -}}
{{- define "gazette.probes" -}}
startupProbe:
  httpGet: {path: /debug/live, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /debug/ready, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /debug/live, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "gazette.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "gazette.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "gazette.selector" . | nindent 6 }}
{{- end }}
