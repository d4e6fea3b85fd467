"""The paged cache: which pages are free, which prefixes they hold, and the tensors themselves."""
