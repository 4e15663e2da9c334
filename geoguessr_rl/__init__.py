"""Post-train an open vision-language model with GRPO to place a street-level photo on the map."""
