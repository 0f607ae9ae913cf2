"""The paged KV cache: pages, the layouts that fill them, and the table that says whose they are."""
