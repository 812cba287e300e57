"""
The policy: where it comes from, in which order, and what it costs to ask for it.
"""

from __future__ import annotations
import logging
import threading
import time
import pytest
import returnn.frontend as rf
from returnn.config import Config, global_config_ctx
from returnn.util.basic import BehaviorVersion
import returnn_upcast
from returnn_upcast import OPS, UpcastPolicy, get_policy, policy, set_policy
from returnn_upcast.config import explain

ALL = frozenset(OPS)


def _ops(options=None, command_line=()):
    config = Config(options or {})
    config.parse_cmd_args(list(command_line))
    with global_config_ctx(config):
        return get_policy().ops


@pytest.mark.parametrize(
    "value, ops",
    [
        (True, ALL),
        (False, frozenset()),
        ({"attention": True, "log_softmax": True}, {"attention", "log_softmax"}),
        ({"attention": False}, frozenset()),
        ("True", ALL),
        ("off", frozenset()),
        ("{'attention': True}", {"attention"}),
    ],
)
def test_parse(value, ops):
    assert UpcastPolicy.parse(value).ops == ops


def test_parse_dict_relative_to_base():
    assert UpcastPolicy.parse({"attention": False}, base=UpcastPolicy.parse(True)).ops == ALL - {"attention"}


def test_policy_is_frozen():
    with pytest.raises(AttributeError):
        UpcastPolicy().ops = ALL


@pytest.mark.parametrize(
    "value, error, words",
    [
        ({"layernorm": True}, ValueError, ["rf_upcast", "'layernorm'", "layer_norm", "softmax"]),
        ({"layernorm": False}, ValueError, ["'layernorm'"]),
        ({"attention": 1}, TypeError, ["rf_upcast", "attention", "True or False"]),
        (1, TypeError, ["rf_upcast", "int", "layer_norm"]),
        (["attention"], TypeError, ["rf_upcast", "list"]),
        ("maybe", ValueError, ["rf_upcast", "'maybe'", "layer_norm"]),
    ],
)
def test_bad_values_name_the_option_and_the_known_ops(value, error, words):
    for read in (UpcastPolicy.parse, set_policy, lambda v: _ops({"rf_upcast": v})):
        with pytest.raises(error) as info:
            read(value)
        assert all(word in str(info.value) for word in words), str(info.value)
    assert policy._override is None


def test_behavior_version_decides_where_no_option_is_set():
    for version, ops in [(38, frozenset()), (39, ALL), (40, ALL)]:
        BehaviorVersion._reset((version, 0))
        assert _ops() == ops
        assert _ops({"rf_upcast": None}) == ops
        assert _ops({"rf_upcast": True}) == ALL
        assert _ops({"rf_upcast": False}) == frozenset()
        assert _ops({"rf_upcast": {"attention": False}}) == ops - {"attention"}
        assert _ops({"rf_upcast": {"softmax": True}}) == ops | {"softmax"}


def test_command_line_forms():
    # without the option in the config: a list of strings, split at commas
    assert _ops(command_line=["++rf_upcast", "True"]) == ALL
    assert _ops(command_line=["++rf_upcast", "{'attention': True, 'softmax': True}"]) == {"attention", "softmax"}
    # over an option in the config: evaluated by RETURNN
    assert _ops({"rf_upcast": False}, ["++rf_upcast", "True"]) == ALL
    assert _ops({"rf_upcast": True}, ["++rf_upcast", "{'attention': True, 'softmax': True}"]) == {
        "attention",
        "softmax",
    }


def test_resolution_order():
    with global_config_ctx(Config({"rf_upcast": {"attention": True}})):
        assert get_policy().ops == {"attention"}
        set_policy({"ctc_loss": True})
        assert get_policy().ops == {"ctc_loss"}
        with policy.scope(True):
            assert get_policy().ops == ALL
            with policy.scope({"attention": False}):
                assert get_policy().ops == ALL - {"attention"}
                with policy.scope(False):
                    assert not get_policy()
            assert get_policy().ops == ALL
        set_policy(None)
        assert get_policy().ops == {"attention"}


def test_follows_changes_of_config_and_behavior_version():
    config = Config({"rf_upcast": {"attention": True}})
    with global_config_ctx(config):
        assert get_policy().ops == {"attention"}
        config.typed_dict["rf_upcast"]["ctc_loss"] = True  # in place
        assert get_policy().ops == {"attention", "ctc_loss"}
        config.typed_dict["rf_upcast"] = True
        assert get_policy().ops == ALL
        config.typed_dict["rf_upcast"] = 1  # equal to True, but no bool
        with pytest.raises(TypeError):
            get_policy()
        del config.typed_dict["rf_upcast"]
        assert not get_policy()
        BehaviorVersion._reset((39, 0))
        assert get_policy().ops == ALL
    BehaviorVersion._reset((38, 0))
    assert not get_policy()


def test_scope_is_left_on_errors_and_not_seen_by_other_threads():
    with pytest.raises(KeyError), policy.scope(True):
        raise KeyError
    assert not get_policy()
    seen = []
    with policy.scope(True):
        thread = threading.Thread(target=lambda: seen.append(get_policy().ops))
        thread.start()
        thread.join()
    assert seen == [frozenset()]


def test_set_policy_is_seen_by_other_threads():
    set_policy(True)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(get_policy().ops))
    thread.start()
    thread.join()
    assert seen == [ALL]


def test_one_log_line_says_what_is_on_and_why(caplog):
    caplog.set_level(logging.INFO, "returnn.frontend.upcast")
    with global_config_ctx(Config({"rf_upcast": {"attention": True}})):
        get_policy()
        get_policy()
    BehaviorVersion._reset((39, 0))
    get_policy()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert "attention" in lines[0] and "option rf_upcast" in lines[0]
    assert "layer_norm" in lines[1] and "behavior_version 39" in lines[1]


def test_explain_gives_reasons():
    BehaviorVersion._reset((39, 0))
    with global_config_ctx(Config({"rf_upcast": {"attention": False}})):
        reasons = explain()
    assert reasons["attention"] == (False, "option rf_upcast = {'attention': False}")
    assert reasons["layer_norm"] == (True, "behavior_version 39")
    assert reasons["softmax"] == (False, "default, opt-in")


def test_latest_behavior_version(caplog):
    stock = BehaviorVersion._latest_behavior_version
    returnn_upcast.install()
    assert BehaviorVersion._latest_behavior_version == max(stock, 39)
    returnn_upcast.uninstall()
    assert BehaviorVersion._latest_behavior_version == stock


def test_scope_is_public():
    returnn_upcast.install()
    with rf.upcast.scope(True):
        assert get_policy().ops == ALL


def test_asking_is_cheap():
    # no timed assertion: the number of Python calls stands for the time, which was measured at below 2 microseconds
    import cProfile
    import pstats

    with global_config_ctx(Config({"rf_upcast": True})):
        get_policy()
        profile = cProfile.Profile()
        profile.runcall(get_policy)
        calls = pstats.Stats(profile).total_calls
        start = time.perf_counter()
        for _ in range(1000):
            get_policy()
        print(f"{(time.perf_counter() - start) * 1e3:.2f} us per call")
    assert calls < 20
