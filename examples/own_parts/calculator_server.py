"""The calculator as an MCP server.

    python calculator_server.py [FILE]

With a FILE, it appends the expression of each call to it.
"""

import sys

import calculator
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> int:
    """Multiplies or adds two whole numbers, such as 12*34 or 12+34."""
    for path in sys.argv[1:]:
        with open(path, "a") as file:
            file.write(f"{expression}\n")
    return calculator.calculate(expression)


if __name__ == "__main__":
    server.run()
