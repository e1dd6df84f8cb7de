import json

from lean_laguna.server.app import ADMIN_ROUTES, ROUTES
from lean_laguna.server.openapi import description


def test_every_route_and_every_body_is_described_without_dangling_references():
    routes = {**ROUTES, **ADMIN_ROUTES}
    document = description(routes)
    for method, path in routes:
        operation = document["paths"][path.replace(":path}", "}")][method.lower()]
        assert operation["summary"]
        takes_body = method == "POST" and path not in ("/resume", "/reset_prefix_cache")
        assert ("requestBody" in operation) == takes_body, path
    text = json.dumps(document)
    schemas = document["components"]["schemas"]
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in schemas
    assert len({o["operationId"] for p in document["paths"].values() for o in p.values()}) == len(routes)


def test_bodies_are_closed_as_the_server_checks_them():
    schemas = description(ROUTES)["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "MessagesRequest", "StreamOptions"):
        assert schemas[name]["additionalProperties"] is False
