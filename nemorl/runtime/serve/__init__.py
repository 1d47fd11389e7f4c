"""The policy behind a URL: three dialects of HTTP (OpenAI's chat completions and responses,
Anthropic's messages) and vLLM's token form, a session for each conversation, and agents as
environments. Others use `Endpoint`, `Session` and `led_by`.
"""
