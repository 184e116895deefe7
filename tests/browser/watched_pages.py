"""Pages in a real Chromium whose errors, failed requests and requests elsewhere are noted."""

#: Paths that Streamlit requests below the page before it requests them at the root.
PROBES = ("/_stcore/health", "/_stcore/host-config")


def watched_page(browser, base, **options):
    """Open a page that may ask `base` alone; return it and the list of its complaints."""
    page, complaints = browser.new_page(**options), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("response", lambda answer: _note_failure(answer, complaints))
    page.on("console", lambda message: _note_console(message, complaints))
    page.on("request", lambda request: _note_foreign_request(request.url, base, complaints))
    return page, complaints


def _note_failure(answer, complaints):
    if answer.status >= 400 and not answer.url.endswith(PROBES):
        complaints.append(f"{answer.status} {answer.url}")


def _note_console(message, complaints):
    probe = message.location.get("url", "").endswith(PROBES)
    if message.type == "error" and not probe:
        complaints.append(message.text)


def _note_foreign_request(url, base, complaints):
    if not url.startswith((base, base.replace("http", "ws"), "data:", "blob:")):
        complaints.append(f"asked {url}")
