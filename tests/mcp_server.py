"""A tiny MCP server over stdin and stdout."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("tiny")


@server.tool()
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


@server.tool()
def join(first: str, second: str) -> str:
    """Two texts as one."""
    return first + second


@server.tool()
def fail(text: str) -> str:
    """Raises."""
    raise ValueError(f"no {text}")


if __name__ == "__main__":
    server.run("stdio")
