"""Built of states and merges: shared prefixes, lists of keys, draft trees, latent prompts."""
