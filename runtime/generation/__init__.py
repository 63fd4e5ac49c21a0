"""Text generation: prompts into the cache, one step for all rows together, tokens picked on the device."""
