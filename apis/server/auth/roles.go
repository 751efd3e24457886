package auth

// ServersGroup is the group of nodes that are servers, beside system:nodes:
// they keep the store and serve the API. The cluster's authority puts it into
// their certificates.
const ServersGroup = "clusterd:servers"
