"""Generators whose engine is another program: vLLM, SGLang, any server of OpenAI's protocol."""
