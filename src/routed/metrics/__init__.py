"""What a router does, measured: pure functions of probabilities, choices and clusters. Entropies are in nats."""
