"""Pages of results that a checkout publishes, from small committed tables, which can be judged again."""
