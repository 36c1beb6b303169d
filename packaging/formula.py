"""Writes the Homebrew formula of an archive: formula.py ARCHIVE VERSION URL."""

import hashlib
import sys
from pathlib import Path

FORMULA = """\
# Made by packaging/build.sh from the archive that it names.
class Keel < Formula
  desc "Runs and serves hybrid language models with memory known before the start"
  version "{version}"
  url "{url}/{name}"
  sha256 "{checksum}"
  license any_of: ["MIT", "Apache-2.0"]

  def install
    bin.install "keel"
    man1.install Dir["man/*.1"]
    bash_completion.install "completions/keel.bash" => "keel"
    zsh_completion.install "completions/_keel"
    fish_completion.install "completions/keel.fish"
    doc.install Dir["*.md"], "docs", "models", "packaging", "keel.cdx.json"
  end

  service do
    run [opt_bin/"keel", "serve"]
    keep_alive true
    log_path var/"log/keel.log"
    error_log_path var/"log/keel.log"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/keel --version")
    refute_empty shell_output("#{{bin}}/keel generate --max-tokens 8 --quiet 'Once upon a time'")
  end
end
"""


def main(archive, version, url):
    archive = Path(archive)
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    print(FORMULA.format(version=version, url=url, name=archive.name, checksum=checksum), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
