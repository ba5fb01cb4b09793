"""Locust's web UI in a real browser: the tabs are there, and show what was measured."""

from __future__ import annotations

import functools
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1400,900",
)  # fmt: skip


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def until(look: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {look}")


def rows(browser: Any) -> list[list[str]]:
    script = """return [...document.querySelectorAll('table tr')].map(
        row => [...row.querySelectorAll('th, td')].map(cell => cell.innerText.trim()))"""
    found: list[list[str]] = browser.execute_script(script)
    return found


def shows(browser: Any, title: str, name: str) -> bool:
    """The tab has a row of that name with a value that is not nothing."""
    return open_tab(browser, title) and any(
        row and row[0] == name and row[1] not in ("", "0") for row in rows(browser)
    )


def open_tab(browser: Any, title: str) -> bool:
    script = """const tab = [...document.querySelectorAll('[role=tab]')].find(
        tab => tab.innerText.trim().toUpperCase() === arguments[0].toUpperCase());
        if (tab) tab.click(); return Boolean(tab)"""
    return bool(browser.execute_script(script, title))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_browser_shows_ttft_itl_tokens_and_the_servers_series(
    browser: Any, locust: Any, paced: str, workload: Callable[..., str], tmp_path: Path,
    processes: int,
) -> None:  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    running = locust(
        "--web-host", "127.0.0.1", "--web-port", str(port), "--host", paced,
        "--workload", workload(stop="{sessions: 4000}"), "--loglevel", "WARNING",
        "--out", str(tmp_path / "out"),
        *(["--processes", str(processes)] if processes > 1 else []),
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def page() -> bool:
        from selenium.common.exceptions import WebDriverException

        try:
            browser.get(url)
        except WebDriverException:
            return False
        return bool(browser.execute_script("return Boolean(document.querySelector('form'))"))

    until(page)
    if processes > 1:
        workers = "return window.templateArgs.worker_count"
        until(lambda: browser.get(url) or browser.execute_script(workers) == processes)
    # The workload's own concurrency stands in the form.
    users = "return document.querySelector('[name=userCount], [name=user_count]').value"
    assert browser.execute_script(users) == "4"
    press = "const b = document.querySelector('button[type=submit]'); b?.click(); return Boolean(b)"
    until(lambda: browser.execute_script(press))
    try:
        look_at_tabs(browser)
    except AssertionError as error:
        running.interrupt()
        raise AssertionError(f"{error}\n{running.finish()[1]}") from error
    browser.save_screenshot(str(tmp_path / "tabs.png"))
    running.interrupt()
    code, output = running.finish()
    assert code == 2, output
    assert (tmp_path / "out" / "result.json").is_file()


def look_at_tabs(browser: Any) -> None:
    """Each of our tabs has its columns, and a row of the run's class with values."""
    for title, heading in (
        ("TTFT", "50%ile (ms)"),
        ("ITL", "99%ile (ms)"),
        ("Tokens/s", "Output tokens/s"),
        ("Server", "Largest"),
    ):
        wanted = "generation_tokens" if title == "Server" else "short"
        until(functools.partial(shows, browser, title, wanted))
        assert any(heading in row for row in rows(browser)), title
