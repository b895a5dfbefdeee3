"""Named checks of a client, run in their order. Imported by the scripts beside it."""

import sys

checks = []


def check(function):
    checks.append(function)
    return function


def run(client):
    """Runs them all; the first that does not hold is named and ends the script with 1."""
    for function in checks:
        try:
            function()
        except Exception as error:
            sys.exit(f"{client}: {function.__name__}: {type(error).__name__}: {error}")
        print(f"{client}: {function.__name__} ok")


def expect(error_type, code, call, param=...):
    """The error of OpenAI's client that a call ends with, with this code and parameter."""
    try:
        call()
    except error_type as error:
        assert error.code == code, f"code {error.code}, expected {code}"
        assert param is ... or error.param == param, f"param {error.param}, expected {param}"
        assert error.request_id, "no x-request-id"
        return error
    raise AssertionError(f"no {error_type.__name__}")
