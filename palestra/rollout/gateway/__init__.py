"""The gateway: programs written against OpenAI's or Anthropic's API as policies; tokens captured at the engine."""
