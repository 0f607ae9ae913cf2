"""From prompts to text: tokens in, requests served together, text out."""
