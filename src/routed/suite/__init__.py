"""A score card for any router: probes with known answers, fixed at a version, beside the routers of `routed`."""
