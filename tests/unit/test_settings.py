"""Every setting: where it comes from, what is refused, and that secrets stay out of sight."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram.gateway.gate import CAPABILITIES
from engram.kernel.errors import ConfigError
from engram.kernel.settings import Setting, Settings, default_data_dir, described

SETTINGS = dict(described())
SECRETS = {name for name, setting in SETTINGS.items() if setting.secret}

# For each setting, what it does not take. A list takes anything.
BAD: dict[str, list[str]] = {
    "data_dir": ["   "],
    "postgres_dsn": ["   ", "hunter2-localhost", "mysql://root:hunter2@db/x"],
    "memory_dsn": ["hunter2-localhost", "https://hunter2@db/x"],
    "embeddings_url": ["hunter2", "ftp://hunter2"],
    "embeddings_key": ["  "],
    "embeddings_model": ["  "],
    "redis_url": ["hunter2", "http://:hunter2@cache"],
    "openmemory_base_url": ["localhost:8080", "ftp://memory", "  "],
    "openmemory_api_key": ["   "],
    "openmemory_timeout_seconds": ["0", "301", "soon", "nan", "inf", "-1"],
    "breaker_failures": ["0", "1001", "3.5", "three"],
    "breaker_cooldown_seconds": ["0", "601", "x"],
    "project_key": ["  ", "a b", "a/b", "a:b", "x" * 65, "a\nb"],
    "gateway_host": ["   "],
    "gateway_port": ["-1", "65536", "http", "80.0"],
    "gateway_mode": ["HALF", "full-ish"],
    **{f"skip_{name}": ["yes please", "2", "  "] for name in CAPABILITIES},
    "allowed_hosts": [],
    "allowed_origins": [],
    "max_body_bytes": ["1023", str((1 << 30) + 1), "1MB"],
    "store_deadline_seconds": ["0.1", "301", "x"],
    "query_deadline_seconds": ["0.1", "301", "x"],
    "tokens_file": ["  "],
    "token": ["  "],
    "alert_webhook_url": ["hunter2", "ftp://hunter2"],
    "artifacts_dir": ["  "],
    "gitlab_token": ["  "],
    "scm_timeout_seconds": ["0", "86401", "soon"],
    "scm_lease_seconds": ["0", "86401", "1.5"],
    "scm_poll_seconds": ["0", "86401", "often"],
    "scm_max_patch_bytes": ["1023", "1e6", "much"],
    "sandbox_driver": ["docker", "1"],
    "sandbox_dir": ["  "],
    "sandbox_uid": ["0", "-1", "nobody"],
    "sandbox_max_per_owner": ["-1", "many"],
    "sandbox_execs_per_owner": ["0", "x"],
    "sandbox_ttl_seconds": ["0", "1h"],
    "sandbox_min_ttl_seconds": ["0", "1.5"],
    "sandbox_max_ttl_seconds": ["0", "31536001"],
    "sandbox_exec_seconds": ["0", "86401"],
    "sandbox_cpu_seconds": ["0", "x"],
    "sandbox_memory_mb": ["15", "1G"],
    "sandbox_processes": ["0", "x"],
    "sandbox_disk_mb": ["0", "x"],
    "sandbox_file_mb": ["0", "x"],
    "sandbox_output_bytes": ["1023", "x"],
    "instance": ["a b", "x" * 65],
    "idempotency_ttl_seconds": ["0", "-1", "x"],
    "outbox_batch_size": ["0", "1001", "x"],
    "outbox_lease_seconds": ["0", "86401", "1.5"],
    "outbox_base_backoff_seconds": ["0", "86401", "x"],
    "outbox_max_backoff_seconds": ["0", "604801", "x"],
    "outbox_jitter_factor": ["-0.1", "1.1", "x"],
    "outbox_max_retries": ["0", "1001", "x"],
    "outbox_poll_seconds": ["0", "3601", "x"],
    "ingest_queue": ["rabbit"],
    "kafka_bootstrap_servers": ["kafka", "kafka:", ":9092", "http://kafka:9092", "a:1,,b:2", "a b:1"],
    "ingest_kafka_max_attempts": ["0", "1001", "x"],
    "ingest_kafka_base_backoff_ms": ["-1", "86400001", "x"],
    "ingest_kafka_max_backoff_ms": ["-1", "604800001", "x"],
    "ingest_kafka_publish_batch_size": ["0", "100001", "x"],
    "ingest_kafka_publish_interval_ms": ["9", "3600001", "x"],
    "ingest_kafka_lease_seconds": ["1", "86401", "x"],
    "ingest_max_attempts": ["0", "1001", "x"],
    "ingest_base_backoff_ms": ["-1", "86400001", "x"],
    "ingest_max_backoff_ms": ["-1", "604800001", "x"],
    "ingest_reclaim_enabled": ["2", "on"],
    "ingest_reclaim_interval_ms": ["9", "x"],
    "ingest_reclaim_idle_ms": ["-1", "x"],
    "ingest_reclaim_batch_size": ["0", "10001", "x"],
    "ingest_dlq_stream_key": ["a b", "x" * 201],
    "ingest_concurrency": ["0", "1001", "x"],
    "ingest_lease_seconds": ["0.1", "86401", "x"],
    "chroma_base_url": ["hunter2", "ftp://hunter2"],
    "parser_memory_mb": ["255", "lots"],
    "parser_seconds": ["0", "86401", "1.5"],
    "ingest_max_upload_bytes": ["1023", "x"],
    "metrics_port": ["-1", "65536", "x"],
    "log_level": ["verbose", "trace"],
    "log_format": ["xml"],
}
CASES = [pytest.param(name, bad, id=f"{name}={bad[:20]!r}") for name, bads in BAD.items() for bad in bads]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `engram.toml` of anybody's in the working directory."""
    monkeypatch.chdir(tmp_path)


def load(**environ: str) -> Settings:
    return Settings.load({"HOME": "/home/someone", **environ})


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engram.toml"
    path.write_text(text, "utf-8")
    return path


def test_this_list_has_every_setting() -> None:
    assert set(BAD) == set(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.env)
def test_each_is_described(setting: Setting) -> None:
    assert setting.env == setting.env.upper()
    assert "." in setting.key
    assert setting.key == setting.key.lower()
    assert setting.doc.endswith(".")
    setting.parse(setting.example)


def test_names_are_not_used_twice() -> None:
    assert len({setting.env for setting in SETTINGS.values()}) == len(SETTINGS)
    assert len({setting.key for setting in SETTINGS.values()}) == len(SETTINGS)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "data_dir"])
def test_every_default_would_be_accepted(name: str) -> None:
    default = getattr(load(), name)
    if default not in (None, ()):
        assert SETTINGS[name].parse(str(default)) == default


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_a_bad_value_is_refused_with_name_problem_and_example(name: str, bad: str) -> None:
    setting = SETTINGS[name]
    with pytest.raises(ConfigError) as refused:
        load(**{setting.env: bad})
    error = refused.value
    before, _, problem = error.message.partition(": ")
    assert before == setting.env
    assert problem
    assert error.hint == f"e.g. {setting.env}={setting.example}"
    assert (repr(bad) in error.message) == (not setting.secret)


@pytest.mark.parametrize(("name", "bad"), CASES)
def test_a_bad_value_in_the_file_is_refused_by_its_key(name: str, bad: str, tmp_path: Path) -> None:
    table, _, key = SETTINGS[name].key.rpartition(".")
    path = written(tmp_path, f"[{table}]\n{key} = {_toml(bad)}\n")
    with pytest.raises(ConfigError) as refused:
        Settings.load({}, file=path)
    assert refused.value.message.startswith(f"{path}: {SETTINGS[name].key}: ")


@pytest.mark.parametrize(("name", "bad"), [case for case in CASES if case.values[0] in SECRETS])
def test_a_bad_secret_is_not_shown(name: str, bad: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(**{SETTINGS[name].env: bad})
    error = refused.value
    assert "hunter2" not in f"{error} {error!r} {error.message} {error.hint} {error.context}"
    # Neither does the chain of causes that a traceback would print.
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_secrets_are_not_in_the_repr() -> None:
    secrets = {
        "POSTGRES_DSN": "postgresql://u:hunter2@db/x",
        "ENGRAM_MEMORY_DSN": "host=db password=hunter2",
        "REDIS_URL": "redis://:hunter2@cache",
        "CHROMA_BASE_URL": "https://u:hunter2@chroma.internal",
        "OPENMEMORY_API_KEY": "om-hunter2",
        "OPENMEMORY_BASE_URL": "https://u:hunter2@memory.internal",
        "ENGRAM_TOKEN": "engram_hunter2",
        "ENGRAM_ALERT_WEBHOOK_URL": "https://hooks.internal/hunter2",
        "ENGRAM_EMBEDDINGS_URL": "https://u:hunter2@api.internal/v1/embeddings",
        "ENGRAM_EMBEDDINGS_KEY": "sk-hunter2",
        "GITLAB_TOKEN": "glpat-hunter2",
    }
    assert set(secrets) == {SETTINGS[name].env for name in SECRETS}
    loaded = load(**secrets)
    assert "hunter2" not in repr(loaded)
    assert "hunter2" not in str(loaded)
    assert all("hunter2" in getattr(loaded, name) for name in SECRETS)


def test_a_password_within_a_url_is_not_in_the_repr() -> None:
    assert "hunter2" not in repr(load(OPENMEMORY_BASE_URL="https://u:hunter2@memory.internal"))


def test_the_defaults_of_the_specification() -> None:
    loaded = load()
    assert (loaded.outbox_base_backoff_seconds, loaded.outbox_max_backoff_seconds) == (60, 3600)
    assert (loaded.outbox_jitter_factor, loaded.outbox_max_retries) == (0.3, 5)
    assert (loaded.gateway_host, loaded.gateway_port) == ("127.0.0.1", 8787)
    assert (loaded.gateway_mode, loaded.project_key) == ("DEGRADED", "default")
    assert loaded.postgres_dsn is loaded.redis_url is loaded.openmemory_base_url is None


def test_values_have_their_types() -> None:
    loaded = load(
        GATEWAY_PORT=" 80 ",
        OPENMEMORY_TIMEOUT_SECONDS="1e1",
        GATEWAY_MODE="full",
        ENGRAM_LOG_LEVEL="DEBUG",
        OPENMEMORY_BASE_URL="http://memory:8080/",
        PROJECT_KEY=" payments ",
    )
    assert loaded.gateway_port == 80
    assert loaded.openmemory_timeout_seconds == 10.0
    assert loaded.gateway_mode == "FULL"
    assert loaded.log_level == "debug"
    assert loaded.openmemory_base_url == "http://memory:8080"
    assert loaded.project_key == "payments"


@pytest.mark.parametrize(
    "dsn", ["postgresql://u@h/d", "postgres://u@h/d", "host=/run/pg dbname=d", "service=engram"]
)
def test_both_forms_of_a_dsn(dsn: str) -> None:
    assert load(POSTGRES_DSN=dsn).postgres_dsn == dsn


def test_lists_are_folded_and_cleaned() -> None:
    loaded = load(ENGRAM_ALLOWED_HOSTS=" Memory.Internal , ,memory.internal:8787,")
    assert loaded.allowed_hosts == ("memory.internal", "memory.internal:8787")


def test_an_empty_variable_is_no_variable(tmp_path: Path) -> None:
    path = written(tmp_path, "[gateway]\nport = 1\n")
    assert Settings.load({"GATEWAY_PORT": ""}, file=path).gateway_port == 1


def test_the_file_in_the_working_directory(tmp_path: Path) -> None:
    written(tmp_path, "[gateway]\nport = 4321\n")
    assert load().gateway_port == 4321


def test_dotted_keys_are_tables_however_they_are_written(tmp_path: Path) -> None:
    for text in ("[gateway]\nport = 5\n", "gateway.port = 5\n", "gateway = { port = 5 }\n"):
        assert Settings.load({}, file=written(tmp_path, text)).gateway_port == 5


def test_the_files_own_types(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [gateway]
        port = 9000
        allowed-hosts = ["A.internal", "b.internal"]
        [outbox]
        jitter-factor = 0.5
        poll-seconds = 2
        [openmemory]
        api-key = "om-1"
        """,
    )
    loaded = Settings.load({}, file=path)
    assert loaded.gateway_port == 9000
    assert loaded.allowed_hosts == ("a.internal", "b.internal")
    assert (loaded.outbox_jitter_factor, loaded.outbox_poll_seconds) == (0.5, 2.0)
    assert loaded.openmemory_api_key == "om-1"


def test_the_environment_beats_the_file_setting_by_setting(tmp_path: Path) -> None:
    path = written(tmp_path, "[gateway]\nport = 1\nmode = 'FULL'\n")
    loaded = Settings.load({"GATEWAY_PORT": "2"}, file=path)
    assert (loaded.gateway_port, loaded.gateway_mode) == (2, "FULL")


def test_a_named_file_beats_the_one_in_the_working_directory(tmp_path: Path) -> None:
    written(tmp_path, "[gateway]\nport = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("[gateway]\nport = 2\n")
    assert load(ENGRAM_CONFIG=str(other)).gateway_port == 2


def test_a_named_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"ENGRAM_CONFIG: there is no file .*missing\.toml"):
        load(ENGRAM_CONFIG=str(missing))
    with pytest.raises(ConfigError, match="ENGRAM_CONFIG"):
        load(ENGRAM_CONFIG=str(tmp_path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Settings.load({}, file=tmp_path / "missing.toml")


def test_what_is_not_toml_is_refused_without_showing_it(tmp_path: Path) -> None:
    path = written(tmp_path, "[openmemory]\napi-key = 'hunter2\n")
    with pytest.raises(ConfigError, match="not valid TOML") as refused:
        Settings.load({}, file=path)
    assert str(path) in refused.value.message
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named", "nearly"),
    [
        ("[gateway]\nprot = 1\n", "gateway.prot", "gateway.port"),
        ("gateway_port = 1\n", "gateway_port", "gateway.port"),
        ("[gateway]\nallowed_hosts = []\n", "gateway.allowed_hosts", "gateway.allowed-hosts"),
        ("[gatway]\nport = 1\n", "gatway.port", "gateway.port"),
        ("[gateway.port]\nnumber = 1\n", "gateway.port.number", "gateway.port"),
        ("b.a = 1\na.b = 2\n", "a.b, b.a", None),
    ],
)
def test_unknown_keys_are_refused_by_name(text: str, named: str, nearly: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.load({}, file=written(tmp_path, text))
    assert refused.value.message.endswith(f"unknown setting {named}")
    meant = f"did you mean {nearly}? " if nearly else ""
    assert refused.value.hint == f"{meant}`engram settings` lists every setting"


def test_unknown_variables_are_somebody_elses() -> None:
    assert load(GATEWAY_PROT="1") == load()


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"HOME": "/home/someone"}, "/home/someone/.local/share/engram"),
        ({"HOME": "/home/someone", "XDG_DATA_HOME": "/data"}, "/data/engram"),
        ({"HOME": "/home/someone", "XDG_DATA_HOME": ""}, "/home/someone/.local/share/engram"),
    ],
)
def test_the_default_data_folder(environ: dict[str, str], path: str) -> None:
    assert default_data_dir(environ) == Path(path)
    assert Settings.load(environ).data_dir == Path(path)


def test_without_a_home_the_users_own_is_taken() -> None:
    assert default_data_dir({}) == Path.home() / ".local/share/engram"


def test_a_given_data_folder_is_absolute(tmp_path: Path) -> None:
    assert load(ENGRAM_DATA_DIR="here").data_dir == tmp_path / "here"
    assert load(ENGRAM_DATA_DIR="~/there").data_dir == Path.home() / "there"


def test_the_default_data_folder_never_depends_on_the_working_directory() -> None:
    assert load(XDG_DATA_HOME="relative").data_dir.is_absolute()


@pytest.mark.parametrize("name", ["ENGRAM_DATA_DIR", "ENGRAM_CONFIG"])
def test_a_home_of_nobody_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load(**{name: "~no-such-user/engram"})


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engram.toml"
    path.write_bytes(b"\xff\xfe[gateway]\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Settings.load({}, file=path)


def test_an_unknown_empty_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting gatway"):
        Settings.load({}, file=written(tmp_path, "[gatway]\n"))


def test_a_list_for_one_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"openmemory\.api-key"):
        Settings.load({}, file=written(tmp_path, "[openmemory]\napi-key = ['om-1', 'om-2']\n"))


def _toml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8787"),
        ("0.0.0.0", "http://127.0.0.1:8787"),  # noqa: S104
        ("::", "http://[::1]:8787"),
        ("10.0.0.7", "http://10.0.0.7:8787"),
    ],
)
def test_a_gateway_that_listens_everywhere_is_called_on_loopback(host: str, url: str) -> None:
    assert Settings.load({"GATEWAY_HOST": host}).gateway_url == url
