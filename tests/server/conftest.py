"""A server with the demo model, and a browser that opens its page, for all tests of the server."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers.browser import CHROMIUM
from helpers.fine_tunes import make_model
from helpers.reasoning import ReasoningServer
from helpers.scripted import ApiProcesses, apis_of
from helpers.server import RunningServer, run_server
from llama import Llama

# Files whose tests run with the APIs in the process of the model, and in two others.
OVER_BOTH_PORTS = {
    "test_bad_requests",
    "test_embeddings",
    "test_http_versions",
    "test_messages",
    "test_ollama",
    "test_responses_api",
    "test_running_usage_and_scores",
    "test_server",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose how many API processes the server of each test has."""
    if "server" in metafunc.fixturenames and not hasattr(metafunc.module, "server"):
        is_for_both = metafunc.module.__name__.rpartition(".")[2] in OVER_BOTH_PORTS
        counts = [0, 2] if is_for_both else [0]
        metafunc.parametrize("server", counts, indirect=True, scope="session")


@pytest.fixture(scope="session")
def server(request) -> Iterator[RunningServer]:
    """A server with the demo model, whose parameter is the number of its API processes."""
    flags = ("--max_seq_len", "512", "--dtype", "fp32", "--api_processes", str(request.param))
    with run_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")  # not longer: playwright's event loop lives in this thread
def browser() -> Iterator[Any]:
    """Headless Chromium, as installed on the system."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: install the package chromium")
    with api.sync_playwright() as playwright:
        # A container may lack user namespaces, which Chromium's sandbox needs. The processes of a
        # zygote would not be waited for, and their CPU time would not be counted.
        arguments = ["--no-sandbox", "--no-zygote"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def browser_context(browser) -> Iterator[Any]:
    """A browser context without chats of other tests."""
    context = browser.new_context(viewport={"width": 1100, "height": 800}, has_touch=True)
    context.set_default_timeout(60_000)
    yield context
    context.close()


@pytest.fixture
def opened(browser_context) -> Iterator[Callable[..., Any]]:
    """A function that opens an address in a new tab, after `prepare(tab)`.

    At the end, the page's script must not have failed.
    """
    pages: list[Any] = []
    errors: list[str] = []

    def open_page(url: str, prepare: Callable[[Any], None] = lambda page: None) -> Any:
        page = browser_context.new_page()
        prepare(page)
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert errors == []


@pytest.fixture
def page(opened, server) -> Any:
    """The page of the server, ready for input."""
    page = opened(server.url)
    page.wait_for_selector("#state.ready")
    return page


@pytest.fixture(scope="module")
def llama_for_tools(make_checkpoint) -> Llama:
    """A tiny random model of the type Llama 3.1, which supports tools."""
    folder, _, _ = make_checkpoint(use_scaled_rope=True)
    return Llama.build(str(folder), max_seq_len=2048, max_batch_size=18, device="cpu")


@pytest.fixture(scope="module", params=[0, 1])
def num_api_processes(request) -> int:
    """The number of API processes of a server in this process: its answers are the same."""
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def apis_of_tools(llama_for_tools, num_api_processes) -> Iterator[ApiProcesses | None]:
    """The API processes of `llama_for_tools`; None for APIs in this process."""
    with apis_of(llama_for_tools, num_api_processes) as apis:
        yield apis


@pytest.fixture(scope="module")
def apis_of_reasoning(reasoning_llama, num_api_processes) -> Iterator[ApiProcesses | None]:
    """The API processes of `reasoning_llama`; None for APIs in this process."""
    with apis_of(reasoning_llama, num_api_processes) as apis:
        yield apis


@pytest.fixture(scope="module")
def reasoning_llama(tmp_path_factory) -> Llama:
    """A tiny random model with the tokens of DeepSeek-R1-Distill-Llama."""
    folder = make_model(tmp_path_factory.mktemp("r1"), "r1")
    return Llama.build(str(folder), max_seq_len=2048, max_batch_size=8, device="cpu")


@pytest.fixture
def reasoning_server(reasoning_llama) -> Iterator[ReasoningServer]:
    """A server in this process whose model writes given texts, with reasoning."""
    with contextlib.closing(ReasoningServer(reasoning_llama)) as made:
        yield made


@pytest.fixture
def reasoning_over_both_ports(reasoning_llama, apis_of_reasoning) -> Iterator[ReasoningServer]:
    """The same, with its APIs in this process, and in another one."""
    with contextlib.closing(ReasoningServer(reasoning_llama, apis_of_reasoning)) as made:
        yield made
