"""States of parts: where they wait, and how they are merged."""
