"""The second floor: models, an engine and a server, the first users of the attention below."""
