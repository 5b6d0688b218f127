"""The calculator as an MCP server, which notes each call in the file that its argument names."""

import sys

import calculator
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> int:
    """Multiplies or adds two whole numbers, such as 12*34 or 12+34."""
    for name in sys.argv[1:]:
        with open(name, "a") as file:
            file.write(f"{expression}\n")
    return calculator.calculate(expression)


if __name__ == "__main__":
    server.run()
