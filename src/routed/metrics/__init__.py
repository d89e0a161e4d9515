"""Metrics of routing: pure functions of probabilities, choices and clusters. Entropies are in nats."""
