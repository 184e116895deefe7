"""Keep a page current: read the run, build the view, draw it, again and again.

Threads
    Each run of a browser session's script has a thread of Streamlit's. It draws the frame, and `refresh.show`
    draws the view as a fragment, which Streamlit runs each second while the run goes on or its verdict is awaited.
    One thread of our own computes verdicts, one after the other (`verdicts`): a verdict on a long run takes
    seconds, and figures must not wait for it. A page shows the newest one, and says its age once it is old.

A refresh (`refresh`)
    A refresh reads the run if its content is due: after a pause of three times what reading and building it cost,
    so that a page of a large run takes at most a quarter of a core. Otherwise it draws the last content again, with
    a new age of the data. Rows are drawn as they are built: the answer does not wait for the figures below. Panels
    have turns: a refresh of a live page builds those of one turn, and takes the others from the content before.

What is cached, for how long, and why
    content     per view, selection, theme and loader (32 of them), until it is due: sessions that look at the same
                share one reading. A session also keeps its own last content, which a paused page shows.
    answers     per run (8), as long as no record comes: the views of a finished run ask much the same.
    verdict     per run (32): of a finished run until its files change; of a live run 10 seconds, or 25 times its
                cost if that is longer.
    ranks       per run (32), 10 seconds, renewed in the background.
    forecast    per loop (8), 30 seconds: it takes up to a second and changes slowly. So does the choice of the rank
                that waits longest, else a page would switch between ranks that wait alike.
    what-if     the last 8 predictions for a setting of the sliders.

Where a value is made as a whole and lives for a fixed time, the cache is Streamlit's own (ranks, forecast). Its
caches can neither hand over a content row by row while it is built, nor let it live as long as its cost asks for:
contents, answers and verdicts have theirs in this package.
"""
