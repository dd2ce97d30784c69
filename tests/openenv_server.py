"""A server with the wire format of OpenEnv, for tests of its client."""

from typing import Any

from fastapi import FastAPI, WebSocket, WebSocketDisconnect

OPEN: set[int] = set()
"""Sessions."""


def application(sessions: int = 100) -> FastAPI:
    """Counts down from a number that the seed says; `boom` is an error of the environment."""
    app = FastAPI()

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        number = {"type": "integer"}
        metadata = {"type": "object"}
        return {"action": {"properties": {"metadata": metadata, "take": number}, "required": ["take"]}}

    @app.websocket("/ws")
    async def session(websocket: WebSocket) -> None:
        await websocket.accept()
        if len(OPEN) >= sessions:
            full = {"code": "CAPACITY_REACHED", "message": f"{len(OPEN)} of {sessions} sessions"}
            await websocket.send_json({"type": "error", "data": full})
            await websocket.close()
            return
        OPEN.add(id(websocket))
        left, steps = 0, 0
        try:
            while (message := await websocket.receive_json())["type"] != "close":
                data, answer = message.get("data", {}), {}
                if message["type"] == "reset":
                    left, steps = data.get("start", data["seed"] % 5 + 3), 0
                    answer = {
                        "type": "observation",
                        "data": {"observation": {"left": left}, "reward": None, "done": False},
                    }
                elif message["type"] == "state":
                    answer = {"type": "state", "data": {"step_count": steps}}
                elif data.get("take") == 13:
                    answer = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "bad luck"}}
                elif not isinstance(data.get("take"), int):
                    errors = [{"loc": ["take"], "msg": "Input should be a valid integer"}]
                    answer = {
                        "type": "error",
                        "data": {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": errors},
                    }
                else:
                    left, steps = left - data["take"], steps + 1
                    seen = {"observation": {"left": left}, "reward": float(left == 0), "done": left <= 0}
                    answer = {"type": "observation", "data": seen}
                await websocket.send_json(answer)
        except WebSocketDisconnect:
            pass
        finally:
            OPEN.discard(id(websocket))

    return app
