"""scripts/two_hosts.sh: the hosts see each other until the link is cut; whatever ends the command, they go, and so does
what runs there.

usage: test_two_hosts.py SCRIPT, which calls itself with `inside` on the two hosts."""
import os
import signal
import subprocess
import sys
import time

SCRIPT = sys.argv[1]
LISTEN = """import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("10.77.0.%d", 7777))
s.settimeout(1)
print("ready", flush=True)
s.recv(9)"""
SPEAK = """import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(5):
    s.sendto(b"x", ("10.77.0.%d", 7777))
    time.sleep(0.05)"""


def call(*words, hosts=None):
    env = dict(os.environ, MUSTER_TWO_HOSTS=hosts) if hosts else None
    return subprocess.run([SCRIPT, *words], env=env, text=True, capture_output=True, timeout=30)


def hears(host, other):
    """Whether a datagram comes from that host to the other."""
    ear = subprocess.Popen([SCRIPT, "on", str(other), sys.executable, "-c", LISTEN % (other + 1)], text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert ear.stdout.readline() == "ready\n"
    call("on", str(host), sys.executable, "-c", SPEAK % (other + 1))
    return ear.wait() == 0


def rates():
    return [call("on", str(i), "tc", "qdisc", "show", "dev", f"link{i}").stdout for i in (0, 1)]


def inside():
    assert hears(0, 1) and hears(1, 0)
    call("cut")
    assert not hears(0, 1)
    call("mend")
    assert hears(0, 1)
    call("limit", "10mbit")
    assert all("tbf" in r and "rate 10Mbit" in r for r in rates()), rates()
    call("limit", "none")
    assert not any("tbf" in r for r in rates()), rates()
    assert call("on", "0", "hostname").stdout != call("on", "1", "hostname").stdout
    print(os.environ["MUSTER_TWO_HOSTS"])


def gone(hosts):
    names = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
    return f"muster-{hosts}-" not in names


def outside():
    done = call("with", sys.executable, __file__, SCRIPT, "inside")
    assert done.returncode == 0, done
    assert gone(done.stdout.strip()), done
    done = call("with", "sh", "-c", "echo $MUSTER_TWO_HOSTS; exit 7")
    assert done.returncode == 7 and gone(done.stdout.strip()), done
    # Ended by a signal while something runs there.
    held = subprocess.Popen([SCRIPT, "with", "sh", "-c", 'echo $MUSTER_TWO_HOSTS; "$0" on 1 sleep 100', SCRIPT], text=True,
                            stdout=subprocess.PIPE)
    hosts = held.stdout.readline().strip()
    assert not gone(hosts)
    deadline = time.time() + 10
    while "sleep" not in (running := commands(hosts)).values():
        assert time.time() < deadline, running
        time.sleep(0.02)
    held.send_signal(signal.SIGTERM)
    assert held.wait(timeout=20) == 143
    assert gone(hosts)
    for pid in running:
        assert not os.path.exists(f"/proc/{pid}") or "Z" in open(f"/proc/{pid}/stat").read().split()[2], running
    print("hosts come and go")


def commands(hosts):
    found = {}
    for pid in call("pids", "1", hosts=hosts).stdout.split():
        try:
            found[int(pid)] = open(f"/proc/{pid}/comm").read().strip()
        except OSError:
            pass
    return found


if sys.argv[2:] == ["inside"]:
    inside()
else:
    can = call("check")
    if can.returncode:
        print(can.stdout, end="")
    else:
        outside()
