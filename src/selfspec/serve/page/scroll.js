// Keeps the end of a growing element in view, unless the reader has scrolled away from it.

const NEAR = 80; // pixels from the end that still count as the end

/** Gives a function that goes to the end and follows it from then on. */
export function followEnd(growing) {
  const page = document.scrollingElement;
  const toEnd = () => page.scrollTo({ top: page.scrollHeight });
  let following = false;
  let last = 0;
  window.addEventListener("scroll", () => {
    const isAtEnd = page.scrollHeight - page.clientHeight - page.scrollTop < NEAR;
    // Only a reader scrolls up. Down, the event may tell of a place that was the end before more text came.
    following = isAtEnd || (following && page.scrollTop >= last);
    last = page.scrollTop;
  });
  new ResizeObserver(() => following && growing.offsetHeight > 0 && toEnd()).observe(growing);
  return () => {
    following = true;
    toEnd();
  };
}
