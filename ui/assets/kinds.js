// The kinds the page knows its way around: where the API serves them.

export const KINDS = {
  nodes: {title: 'Nodes', api: '/api/v1', cluster: true, wide: ['Internal-IP', 'Kernel-Version']},
  pods: {title: 'Pods', api: '/api/v1', wide: ['IP', 'Node']},
  deployments: {title: 'Deployments', api: '/apis/apps/v1', workload: true},
  statefulsets: {title: 'StatefulSets', api: '/apis/apps/v1', workload: true},
  daemonsets: {title: 'DaemonSets', api: '/apis/apps/v1', workload: true},
  replicasets: {title: 'ReplicaSets', api: '/apis/apps/v1', workload: true},
  jobs: {title: 'Jobs', api: '/apis/batch/v1', workload: true},
  cronjobs: {title: 'CronJobs', api: '/apis/batch/v1'},
  services: {title: 'Services', api: '/api/v1'},
  persistentvolumeclaims: {title: 'PersistentVolumeClaims', api: '/api/v1'},
};

// listPath is where a kind is listed, in one namespace or, with '', in all.
export function listPath(resource, namespace) {
  const kind = KINDS[resource];
  return kind.api + (kind.cluster || !namespace ? '' : '/namespaces/' + encodeURIComponent(namespace)) + '/' + resource;
}

export function objectPath(resource, namespace, name) {
  return listPath(resource, namespace) + '/' + encodeURIComponent(name);
}

// linkTo is this page's place for an object.
export function linkTo(resource, meta) {
  return '#/' + [resource, ...(KINDS[resource].cluster ? [] : [meta.namespace]), meta.name].map(encodeURIComponent).join('/');
}
