// A button with a menu: the browser's popover lies above everything and closes by itself.

import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";
import { Icon, type IconName } from "./icons";

interface MenuProps {
  id: string;
  label: string;
  icon: IconName;
  children: ComponentChildren;
}

export function Menu({ id, label, icon, children }: MenuProps) {
  const button = useRef<HTMLButtonElement>(null);
  const list = useRef<HTMLDivElement>(null);
  /** Beneath the button, or above it where there is no room. */
  const place = (event: Event) => {
    if ((event as ToggleEvent).newState !== "open" || !button.current || !list.current) return;
    const at = button.current.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = list.current;
    const below = at.bottom + 4 + height < innerHeight;
    list.current.style.left = `${Math.max(8, Math.min(at.right - width, innerWidth - width - 8))}px`;
    list.current.style.top = `${below ? at.bottom + 4 : at.top - height - 4}px`;
  };
  return (
    <>
      <button type="button" ref={button} class="icon-button" aria-label={label} title={label} popovertarget={id}>
        <Icon name={icon} />
      </button>
      <div id={id} ref={list} class="menu" popover="auto" onToggle={place} onClick={() => list.current?.hidePopover()}>
        {children}
      </div>
    </>
  );
}

export function MenuItem({ icon, label, onClick }: { icon: IconName; label: string; onClick: () => void }) {
  return (
    <button type="button" class="menu-item" onClick={onClick}>
      <Icon name={icon} />
      {label}
    </button>
  );
}
