"""A score card for any router: probes with known answers, frozen at a version, beside the routers that come with `routed`."""
