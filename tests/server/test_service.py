"""The table of a server's models: which one answers a request, and the state of all."""

import pytest

from llama.server.errors import ApiError
from llama.server.limits import Limits, State
from llama.server.service import Service


def service_with(*names: str) -> Service:
    service = Service(Limits())
    for name in names:
        service.add(name)
    return service


@pytest.mark.parametrize("model", [None, "a", "a:latest", "unknown"])
def test_the_only_model_answers_every_request(model):
    service = service_with("a")
    assert service.of(model) is service.default


@pytest.mark.parametrize(
    ("model", "name"), [(None, "a"), ("a", "a"), ("b", "b"), ("b:latest", "b")]
)
def test_the_model_that_a_body_names_answers_it(model, name):
    assert service_with("a", "b").of(model).name == name


def test_several_models_do_not_answer_for_another_name():
    with pytest.raises(ApiError, match="no model 'c': this server has 'a', 'b'") as raised:
        service_with("a", "b").of("c")
    assert (raised.value.status, raised.value.code) == (404, "model_not_found")


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="two models of the server have the name 'a'"):
        service_with("a", "a")


def test_the_server_is_ready_when_all_models_are():
    service = service_with("a", "b")
    first, second = service
    first.state = State.READY
    assert service.state is State.LOADING
    second.state = State.READY
    assert service.state is State.READY
    second.break_off()
    assert service.state is State.BROKEN and service.has_failed
