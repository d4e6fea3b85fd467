"""An OpenAI-compatible server. The engine runs in a process of its own."""
